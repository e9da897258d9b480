"""Commands that were written for horovodrun work with hvdlite-run in its place."""

from __future__ import annotations

import json
import os
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """\
import os, sys
import horovod.torch as hvd
hvd.init()
assert (hvd.rank(), hvd.size()) == (int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]))
import mine
sys.stdout.write(f"{hvd.allgather_object(hvd.rank())} {sys.argv[1:]} {mine.HERE}\\n")
"""


def test_its_flags_tune_the_workers_or_say_why_not(launch):
    names = "HVDLITE_FUSION_THRESHOLD", "HVDLITE_STALL_CHECK_DISABLE"
    program = f"import os; print(*(os.environ[name] for name in {names}))"
    flags = ("--gloo", "--fusion-threshold-mb", "1", "--no-stall-check", "--cycle-time-ms", "5", "--no-autotune")
    code, out, err = launch(*flags, "-np", "2", sys.executable, "-c", program).ended()
    assert code == 0
    assert sorted(out.decode().splitlines()) == [f"[{rank}]<stdout>:1048576 1" for rank in (0, 1)]
    assert err.decode() == (
        "hvdlite-run: --cycle-time-ms has no effect: hvdlite has no cycles: "
        "a collective starts when the ranks call it\n"
    )


@pytest.mark.night
def test_autotune_measures_for_every_optimizer_and_writes_one_line_for_each(launch, tmp_path):
    program = (
        "import torch, hvdlite as hvd; hvd.init(); torch.manual_seed(0); model = torch.nn.Linear(512, 512); "
        "o = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()); "
        "model(torch.ones(1, 512)).sum().backward(); o.step(); "
        "print(*hvd.allgather_object(o._reducer.settings.cap_bytes))"
    )
    flags = ("--autotune", "--autotune-log-file", "log.jsonl", "--log-level", "INFO")
    job = launch(*flags, "-np", "2", sys.executable, "-c", program, cwd=tmp_path)
    code, out, err = job.ended()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    cap = json.loads(line)["cap_bytes"]
    assert (code, sorted(out.decode().splitlines())) == (0, [f"[{rank}]<stdout>:{cap} {cap}" for rank in (0, 1)])
    told = [each for each in err.decode().splitlines() if "INFO: autotune: buckets of at most" in each]
    assert [each.partition(":")[0] for each in told] == ["[0]<stderr>"]


def test_a_program_for_horovod_runs_unchanged_in_a_shell(launch, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "mine.py").write_text("HERE = 'mine'")
    job = launch(
        "-np", "2", "--horovod", "sh", "-c", f"{sys.executable} train.py x", cwd=tmp_path, env={"PYTHONPATH": "modules"}
    )
    code, out, err = job.ended()
    assert (code, err) == (0, b"")
    assert sorted(out.decode().splitlines()) == [f"[{rank}]<stdout>:[0, 1] ['x'] mine" for rank in (0, 1)]
    job.assert_gone()


@pytest.mark.night
def test_each_host_finds_its_own_hvdlite_where_a_program_imports_horovod(launch, make_lan):
    lan = make_lan("a", "b")
    program = "import os, horovod.torch as hvd; hvd.init(); print(hvd.rank(), hvd.local_rank(), os.uname().nodename)"
    code, out, err = launch("-H", "a,b", "--horovod", sys.executable, "-c", program, on=lan.desk).ended(120)
    assert (code, err) == (0, b"")
    assert sorted(out.decode().splitlines()) == ["[0]<stdout>:0 0 a", "[1]<stdout>:1 0 b"]


@pytest.mark.night
def test_a_function_may_be_one_for_horovod(launch, tmp_path):
    (tmp_path / "call.py").write_text(
        "import hvdlite_launcher\n"
        "def rank():\n"
        "    import horovod.torch as hvd\n"
        "    hvd.init()\n"
        "    return hvd.rank()\n"
        "if __name__ == '__main__':\n"
        "    print(hvdlite_launcher.run(rank, np=2, horovod=True, cycle_time_ms=1))\n"
    )
    job = launch(program=(str(tmp_path / "call.py"),))
    code, out, err = job.ended()
    assert (code, out) == (0, b"[0, 1]\n")
    assert err.startswith(b"hvdlite-run: --cycle-time-ms has no effect: ")
    assert err.count(b"\n") == 1


@pytest.mark.night
def test_without_the_flag_nothing_is_named_horovod(launch):
    code, _, err = launch("-np", "1", sys.executable, "-c", "import horovod", env={"PYTHONPATH": os.devnull}).ended()
    assert code == 1
    assert b"ModuleNotFoundError: No module named 'horovod'" in err
