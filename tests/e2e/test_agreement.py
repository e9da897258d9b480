"""Errors and warnings of real ranks that call different operations, after a rank has ended, or while one is late."""

from __future__ import annotations

import re
import sys

import pytest
from e2e.conftest import PATIENCE_S
from long_run import chosen

pytestmark = pytest.mark.slow

# Modules that are imported on first use are imported here, so that no rank is late because of it.
IMPORTS = "import os, signal, time, torch, hvdlite as hvd\nhvd.DistributedOptimizer\nhvd.init()\n"

# Long enough for a rank of a busy machine that is to come, short enough to wait for one that is not.
LIMITS = {"HVDLITE_STALL_CHECK_TIME_S": "8", "HVDLITE_STALL_SHUTDOWN_S": "16"}


def run(launch, program: str, *, size: int = 2, **env: str) -> tuple[int, str, str]:
    job = launch("-np", str(size), sys.executable, "-c", IMPORTS + program, env=env)
    code, out, err = job.ended()
    job.assert_gone()
    return code, out.decode(), err.decode()


def test_ranks_that_differ_all_say_the_same_and_the_job_fails(launch):
    code, _, err = run(launch, "hvd.allreduce(torch.ones(2 + hvd.rank()), name='loss')", size=3)
    assert code == 1
    told = set(re.findall(r"\[[0-3,-]+\]<stderr>:.*(Mismatched ALLREDUCE tensor shapes: One rank sent .*)", err))
    assert len(told) == 1
    assert "rank 2 (localhost): [4]" in told.pop()


def test_ranks_that_wait_for_each_other_are_told_what_both_wait_in(launch):
    code, _, err = run(launch, "hvd.barrier() if hvd.rank() else hvd.allreduce(torch.ones(2), name='loss')")
    assert code == 1
    assert "Mismatched operations" in err
    assert "rank 0 (localhost): allreduce of 'loss' in the global process set; rank 1 (localhost): barrier" in err


@pytest.mark.night
def test_a_rank_that_has_ended_by_itself_is_named_by_those_that_still_wait(launch):
    code, _, err = run(launch, "hvd.barrier()\nif hvd.rank(): hvd.allreduce(torch.ones(2), name='loss')")
    assert code == 1
    assert "Horovod has been shut down. allreduce of 'loss' failed because rank 0 (localhost) has ended" in err


@pytest.mark.night
def test_a_rank_that_takes_fewer_steps_is_named_by_those_that_wait_for_it_in_theirs(launch):
    program = (
        "param = torch.nn.Parameter(torch.zeros(2))\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [('fc.weight', param)])\n"
        "for _ in range(2 + hvd.rank()):\n"
        "    optimizer.zero_grad(); param.sum().backward(); optimizer.step()\n"
    )
    code, _, err = run(launch, program)
    assert code == 1
    assert (
        "the all-reduce of the gradients of fc.weight (bucket 0 of optimizer 1) failed on rank 1 (localhost) because "
        "rank 0 (localhost) has " in err
    )
    assert "has ended: every rank must take the same number of steps and call the same collectives; for ranks" in err
    assert "see hvd.join(). If it called sys.exit(), look at its output. (" in err


def test_a_rank_that_does_not_come_to_the_step_is_named_and_the_job_is_ended_if_that_is_asked_for(launch):
    program = (
        "param = torch.nn.Parameter(torch.zeros(2))\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [('fc.weight', param)])\n"
        "param.sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "if hvd.rank() == 1: time.sleep(1000)\n"
        "param.sum().backward(); optimizer.step()\n"
    )
    code, _, err = run(launch, program, size=3, **LIMITS)
    assert code == 1
    assert "the all-reduce of the gradients of fc.weight" in err
    assert re.search(
        r"\(bucket 0 of optimizer 1\), for ranks .* rank 1 \(localhost, pid \d+\), which is at <string>:\d+ in ", err
    )
    assert "After 16 s (HVDLITE_STALL_SHUTDOWN_S) the job is ended" in err


def test_a_rank_that_does_not_come_to_an_operation_is_told_of_in_the_log(launch, tmp_path):
    # Rank 1 comes when rank 0 has told of it.
    program = f"""
import logging
told = {str(tmp_path / "told")!r}
class Look(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        if "stalled: allreduce of 'loss'" in record.getMessage(): open(told, "w").close()
if hvd.rank() == 0: logging.getLogger("hvdlite").addHandler(Look())
while hvd.rank() == 1 and not os.path.exists(told): time.sleep(0.01)
print(hvd.allreduce(torch.ones(1), name='loss', op=hvd.Sum).item())
"""
    code, out, err = run(launch, program, HVDLITE_STALL_CHECK_TIME_S="1")
    assert code == 0
    assert out.count("2.0") == 2
    assert re.search(r"\[0\]<stderr>:.*stalled: allreduce of 'loss' .* missing: rank 1 \(localhost, pid \d+\)", err)


@pytest.mark.night
def test_names_pair_up_in_any_order_also_with_children_that_were_forked_meanwhile(launch):
    program = (
        "loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2, multiprocessing_context='fork')\n"
        "names = [str(number) for number in range(20)]\n"
        "order = names if hvd.rank() else names[::-1]\n"
        "handles = {name: hvd.allreduce_async(torch.tensor(float(name)), name=name, op=hvd.Sum) for name in order}\n"
        "seen = sum(int(batch) for batch in loader)\n"
        "print(seen, [hvd.synchronize(handles[name]).item() for name in names] == [2.0 * n for n in range(20)])\n"
    )
    code, out, _ = run(launch, program)
    assert code == 0
    assert out.count("28 True") == 2


@pytest.mark.night
def test_the_check_can_be_turned_off_and_must_be_on_all_ranks(launch):
    program = (
        "print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())\n"
        "hvd.shutdown()\n"
        "os.environ['HVDLITE_CHECK'] = os.environ['RANK']\n"
        "hvd.init()\n"
    )
    code, out, err = run(launch, program, HVDLITE_CHECK="0")
    assert out.count("2.0") == 2
    assert code == 1
    assert "HVDLITE_CHECK (0 or 1) is False on rank 0 (localhost) and True on rank 1 (localhost)" in err


# Rank `frozen` stops itself when all others are known to have finished the last operation that they did together.
FREEZES = {
    "in an operation that all have begun": """
from hvdlite.calls.operation import Kind, Operation
from hvdlite.runtime.world import current_world
world = current_world()
def body(execution):
    if hvd.rank() == frozen:
        freeze()
    execution.group.all_reduce(torch.ones(1), execution.what).wait()
world.controller.submit(world.group, Operation(Kind('halves'), body, 'a')).wait()
""",
    "before a step": """
param = torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [('fc.weight', param)])
param.sum().backward(); optimizer.step(); optimizer.zero_grad()
if hvd.rank() == frozen:
    freeze()
param.sum().backward(); optimizer.step()
""",
    "while another thread goes on": """
import threading
others = hvd.add_process_set([rank for rank in range(3) if rank != frozen])
param = torch.nn.Parameter(torch.zeros(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [('fc.weight', param)])
param.sum().backward(); optimizer.step(); optimizer.zero_grad()
if hvd.rank() == frozen:
    freeze()
def go_on():
    while True:
        hvd.allreduce(torch.ones(1), name='on', process_set=others)
threading.Thread(target=go_on, daemon=True).start()
param.sum().backward(); optimizer.step()
""",
    "before an operation": "if hvd.rank() == frozen: freeze()\nhvd.allreduce(torch.ones(1), name='a')",
}


@pytest.mark.night(but=1)
@pytest.mark.parametrize("where", FREEZES)
def test_a_rank_that_is_frozen_is_named_and_the_job_ended_whatever_the_others_wait_in(launch, where):
    ranks = chosen([0, 1], few=[list(FREEZES).index(where) % 2])
    # A process does not stop at the very moment at which it sends itself the signal.
    program = (
        "import sys\nfrozen = int(sys.argv[1])\n"
        "def freeze():\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    while True: time.sleep(1)\n" + FREEZES[where]
    )
    env = {**LIMITS, "HVDLITE_LOG_LEVEL": "warning"}
    # All at once, because they mostly wait.
    jobs = [launch("-np", "3", "python", "-c", IMPORTS + program, str(frozen), env=env) for frozen in ranks]
    for frozen, job in zip(ranks, jobs, strict=True):
        code, _, output = job.ended(PATIENCE_S)
        err = output.decode()
        assert code != 0
        assert re.search(rf"stalled: .*rank {frozen} \(localhost, pid \d+\)", err), err
        assert "After 16 s (HVDLITE_STALL_SHUTDOWN_S) the job is ended" in err
        if frozen == 0:
            assert re.search(r"rank 0 \(localhost, pid \d+\) has not answered for \d+ s", err), err
        what = {"in an": "halves of 'a'", "before an": "allreduce of 'a'"}
        said = next((words for start, words in what.items() if where.startswith(start)), "(bucket 0 of optimizer 1)")
        assert said in err
        job.assert_gone()


@pytest.mark.night(but=1)
@pytest.mark.parametrize(("hanging", "check"), chosen([(0, "1"), (1, "1"), (1, "0")], few=[(0, "1"), (1, "0")]))
def test_a_rank_in_an_endless_loop_is_told_of_with_the_place_in_its_program(launch, tmp_path, hanging, check):
    script = tmp_path / "train.py"
    script.write_text(
        f"{IMPORTS}def load_batch():\n"
        "    print('in the loop', os.getpid())\n"
        "    while True: pass\n"
        f"if hvd.rank() == {hanging}: load_batch()\n"
        "hvd.allreduce(torch.ones(1), name='loss')\n"
    )
    pairs = [word for name, value in {**LIMITS, "HVDLITE_CHECK": check}.items() for word in ("-x", f"{name}={value}")]
    code, out, err = launch("-np", "2", *pairs, "python", script).ended()
    assert code != 0
    pid = re.search(r"in the loop (\d+)", out.decode())[1]
    said = rf"rank {hanging} \(localhost, pid {pid}\), which is at \S*train.py:\d+ in load_batch"
    assert re.search(said, err.decode()), err.decode()
    assert "HVDLITE_STALL_SHUTDOWN_S" in err.decode()


@pytest.mark.night
def test_a_rank_that_is_stopped_outside_of_everything_is_told_of_as_silent_with_its_pid(launch):
    program = (
        "if hvd.rank() == 1:\n"
        "    print('stopped', os.getpid())\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "hvd.allreduce(torch.ones(1), name='loss')\n"
    )
    code, out, err = run(launch, program, **LIMITS)
    assert code == 1
    pid = re.search(r"stopped (\d+)", out)[1]
    assert re.search(rf"missing: rank 1 \(localhost, pid {pid}\), which .* has sent nothing for \d+ s", err), err


@pytest.mark.night
def test_join_ends_whatever_the_garbage_collector_has_taken_on_which_rank(launch):
    program = (
        "import gc\n"
        "gc.disable()\n"
        "def train():\n"
        "    param = torch.nn.Parameter(torch.zeros(2))\n"
        "    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [('w', param)])\n"
        "    optimizer.itself = optimizer\n"
        "    for _ in range(2 + hvd.rank()):\n"
        "        optimizer.zero_grad(); param.sum().backward(); optimizer.step()\n"
        "    return hvd.join()\n"
        "last = []\n"
        "for collects, os.environ['HVDLITE_SHM'] in ((rank, shm) for shm in '01' for rank in range(3)):\n"
        "    hvd.init()\n"
        "    last.append(train())\n"
        "    if hvd.rank() == collects: gc.collect()\n"
        "    last.append(train())\n"
        "    hvd.shutdown()\n"
        "    gc.collect()\n"
        "print('last', last)\n"
    )
    code, out, err = run(launch, program, size=3)
    assert code == 0, err
    assert out.count("last [") == 3


@pytest.mark.night
@pytest.mark.parametrize("shm", chosen(["0", "1"], few=["1"]))
def test_two_threads_of_each_rank_get_their_own_values_or_an_error_in_every_one_of_many_calls(launch, shm):
    program = """
import threading
wrong, ends = [], []
# Of a thread that calls before there is another one nobody can tell that it is not the only one.
both = threading.Barrier(2)
def with_names(number):
    for call in range(50):
        value = 100 * call + number
        params = {f"model {number}": torch.full((4,), 10000.0 * (1 - hvd.rank()) + value)}
        hvd.broadcast_parameters(params, root_rank=1)
        optimizer = torch.optim.SGD([torch.zeros(1 + number)], lr=1 + 10000.0 * (1 - hvd.rank()) + value)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        told = hvd.broadcast_object((hvd.rank(), value), 1, name=f"object {number}")
        everyones = hvd.allgather_object((hvd.rank(), value), name=f"object {number}")
        if not (
            params[f"model {number}"].tolist() == [value] * 4 and optimizer.param_groups[0]["lr"] == 1 + value
            and told == (1, value) and everyones == [(0, value), (1, value)]
        ):
            wrong.append((number, call, params, told, everyones))
    ends.append("right")
def without_names(number):
    try:
        both.wait(100)
        for call in range(50):
            if hvd.allreduce(torch.full((4,), 1.0 + number), op=hvd.Sum).tolist() != [2.0 + 2 * number] * 4:
                wrong.append((number, call))
        ends.append("right")
    except hvd.HvdliteError as error:
        ends.append(type(error).__name__)
for serve in (with_names, without_names):
    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads if hvd.rank() == 0 else threads[::-1]: thread.start()
    for thread in threads: thread.join()
    assert not wrong, wrong[0]
print("ended", ends)
"""
    code, out, err = run(launch, program, HVDLITE_SHM=shm)
    assert code == 0, err
    assert out.count("ended ['right', 'right', '") == 2
