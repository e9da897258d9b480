"""One whole job of each main kind, among the fast tests; `test_launch` has the launcher without torch."""

from __future__ import annotations

import re
import sys
import textwrap

from e2e.conftest import assert_clean

IMPORTS = "import os, signal, sys\nimport torch\nimport hvdlite as hvd\n"


def program(tmp_path, body: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(IMPORTS + textwrap.dedent(body))
    return [sys.executable, str(path)]


def test_parameters_used_by_one_rank_do_not_mix_with_collectives_between_backward_and_step(launch, tmp_path):
    """Ranks launch their buckets at different times here; metrics and a second optimizer come between."""
    body = """
    hvd.init(timeout_s=60)
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    first = hvd.DistributedOptimizer(torch.optim.SGD(a.parameters(), lr=0.1), bucket_cap_mb=1e-6)
    second = hvd.DistributedOptimizer(torch.optim.SGD(b.parameters(), lr=0.1), bucket_cap_mb=1e-6)
    hvd.broadcast_parameters([*a.parameters(), *b.parameters()])
    for step in range(20):
        first.zero_grad(), second.zero_grad()
        x = torch.ones(1, 2)
        loss = (a(x) if (step + hvd.rank()) % 2 else b(x)).sum()
        loss.backward()
        assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == 2
        second.step(), first.step()
    everything = torch.cat([p.detach().flatten() for m in (a, b) for p in m.parameters()])
    assert torch.equal(hvd.broadcast(everything, 0), everything)
    """
    code, _, err = launch("-np", "2", *program(tmp_path, body)).ended()
    assert code == 0, err.decode()


def test_a_rank_that_raises_in_the_middle_of_backward_ends_the_job_with_its_traceback_last(launch, tmp_path):
    body = """
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), bucket_cap_mb=1e-6)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    def fail(grad):
        raise ZeroDivisionError("in the middle of backward")
    for step in range(10):
        optimizer.zero_grad()
        if step == 3 and hvd.rank() == 1:
            model[0].weight.register_hook(fail)
        model(torch.ones(2, 4) * (hvd.rank() + 1)).square().mean().backward()
        optimizer.step()
    """
    job = launch("-np", "3", *program(tmp_path, body))
    code, _, err = job.ended()
    assert code == 1
    report = err.decode().partition("hvdlite-run: ")[2]
    assert re.match(r"rank 1 on localhost \(pid \d+\) failed first, with exit code 1", report)
    assert report.rstrip().endswith("ZeroDivisionError: in the middle of backward")
    job.assert_gone()


def test_the_others_finish_the_step_in_which_a_worker_is_killed(launch, tmp_path):
    body = """
    hvd.init()
    worker = int(os.environ["HVDLITE_WORKER"])
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for step in range(6):
        optimizer.zero_grad()
        ((worker + 1.0) * weight).backward()
        if (worker, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    print(f"{weight.item():g} on {hvd.size()} ranks")
    """
    code, out, err = launch("-np", "3", "--min-np", "1", "--survive", *program(tmp_path, body)).ended()
    assert code == 0, err.decode()
    # Workers 0, 1 and 2 have gradients of 1, 2 and 3.
    assert sorted(line.partition(":")[2] for line in out.decode().splitlines()) == ["-12 on 2 ranks"] * 2


def test_a_program_for_horovod_runs_unchanged(launch, tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "mine.py").write_text("HERE = 'mine'")
    body = """
    import horovod.torch as hvd
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]))
    import mine
    sys.stdout.write(f"{hvd.allgather_object(hvd.rank())} {sys.argv[1:]} {mine.HERE}\\n")
    """
    command = [*program(tmp_path, body), "x"]
    job = launch("-np", "2", "--horovod", *command, cwd=tmp_path, env={"PYTHONPATH": "modules"})
    code, out, err = job.ended()
    assert (code, err) == (0, b"")
    assert sorted(out.decode().splitlines()) == [f"[{rank}]<stdout>:[0, 1] ['x'] mine" for rank in (0, 1)]
    job.assert_gone()


def test_ranks_fill_the_hosts_in_order(launch, make_lan):
    lan = make_lan("a", "b", "c")
    who = "echo $HVDLITE_RANK on $(uname -n)"
    code, out, err = launch("-np", "4", "-H", "a:2,b,c:3", "sh", "-c", who, on=lan.desk).ended()
    assert code == 0, err.decode()
    lines = sorted(out.decode().splitlines())
    assert lines == [f"[{rank}]<stdout>:{rank} on {host}" for rank, host in enumerate(["a", "a", "b", "c"])]
    assert_clean(lan)
