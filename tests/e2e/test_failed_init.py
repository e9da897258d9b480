"""An `init` that fails, at whatever point, leaves nothing behind, and the next one succeeds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from e2e.conftest import PATIENCE_S
from e2e.victims import run_plainly
from long_run import IS_LONG

pytestmark = pytest.mark.slow

# The points of failure: the functions that are called there.
STAGES = (
    "hvdlite.runtime.make_world.placements_to_topology",
    "hvdlite.runtime.make_world.ShmEngineFactory",
    "hvdlite.shm.setup._make_own",
    "hvdlite.shm.setup._make_context",
    "hvdlite.shm.setup.ShmEngine",
    "hvdlite.runtime.make_world.choose_levels",
    "hvdlite.runtime.make_world.make_controller",
    "hvdlite.control.control_client.ControlClient",
    "hvdlite.control.control_client.ControlClient.open_group",
    "hvdlite.control.control_client.ControlClient.start",
    "hvdlite.timeline.start",
    "hvdlite.timeline._begin",
    "hvdlite.runtime.make_world.Registry",
    "hvdlite.runtime.process_set.Registry.add",
)
# Points at which one rank's error is its own, and the others' errors come from what it leaves.
PROGRAM = """
import gc, importlib, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import hvdlite as hvd

directory, stages = Path(sys.argv[1]), sys.argv[2:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
meetings = 0
TIMEOUT_S = 15  # what one rank waits for the other where it learns nothing of its end

def meet():
    # By files: what is tested is not to be used for it. A store that is served here is gone before.
    global meetings
    gc.collect()
    meetings += 1
    (directory / f"here.{meetings}.{rank}").touch()
    until(lambda: all((directory / f"here.{meetings}.{other}").exists() for other in range(size)), str)

def until(condition, words):
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at, words()
        time.sleep(0.01)

def held():
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": sorted(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in open_fds()),
        "memory": sum("/dev/shm" in line for line in open("/proc/self/maps")),
        "group": dist.is_initialized(), "world": hvd.is_initialized(),
    }

def open_fds():
    # But for the one that this very list is read by.
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
            or os.path.islink(f"/proc/self/fd/{fd}")]

def works():
    hvd.init(timeout_s=60, process_sets=[hvd.ProcessSet([0])])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()

def fails(owner, name, error, alone):
    original = getattr(owner, name)
    def fail(*_, **__):
        raise error(f"in {name}")
    setattr(owner, name, fail)
    try:
        hvd.init(timeout_s=TIMEOUT_S, process_sets=[hvd.ProcessSet([0])])
    except BaseException as caught:
        # Where all fail, one may do so of another's failure before it comes to its own.
        assert f"in {name}" in str(caught) or (not alone and isinstance(caught, hvd.HvdliteError)), repr(caught)
        return True
    finally:
        setattr(owner, name, original)
    return False

def owner_of(stage):
    module, _, name = stage.rpartition(".")
    try:
        return importlib.import_module(module), name
    except ImportError:
        module, _, owner = module.rpartition(".")
        return getattr(importlib.import_module(module), owner), name

works()
meet()
before = held()
for stage in stages:
    ways = ({1}, RuntimeError), ({0}, KeyboardInterrupt), ({0, 1}, KeyboardInterrupt)
    for failing, error in ways if os.environ.get("TEST_HVDLITE_LONG") == "1" else [ways[len(stage) % 3]]:
        if rank in failing:
            assert fails(*owner_of(stage), error, len(failing) == 1), (stage, failing)
        else:
            try:
                # It may have all that it wants of the other.
                hvd.init(timeout_s=TIMEOUT_S, process_sets=[hvd.ProcessSet([0])])
            except hvd.HvdliteError:
                pass
            hvd.shutdown()
        until(lambda: held() == before, lambda: f"{stage} {failing}: {before}\\n{held()}")
        meet()
        works()
        until(lambda: held() == before, lambda: f"after {stage} {failing}: {before}\\n{held()}")
        meet()
print("all of it")
"""


# One job after the other, unless each point is tried in all ways.
TOGETHER = [[stage] for stage in STAGES] if IS_LONG else [STAGES[:7], STAGES[7:]]


@pytest.mark.night
@pytest.mark.parametrize("stages", TOGETHER, ids=lambda stages: stages[0])
def test_an_init_that_fails_leaves_nothing_and_the_next_one_works(stages: Sequence[str], tmp_path: Path, rank_server):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # With a timeline, so that starting it can fail.
    timeline = {"HVDLITE_TIMELINE": str(tmp_path / "timeline.json")}
    for outcome in run_plainly(
        rank_server.python(), 2, [str(program), str(tmp_path), *stages], tmp_path, timeout_s=500, **timeline
    ):
        assert outcome.exit_code == 0, outcome.output
        assert "all of it" in outcome.output


# The second init of rank 0 finds so many descriptors free; with none it cannot ask its agent, with two not connect.
WITHOUT_FILES = """
import os, resource, sys
import hvdlite as hvd

hvd.init()
hvd.shutdown()
kept = []
if os.environ["HVDLITE_RANK"] == "0":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    try:
        while True:
            kept.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for _ in range(int(sys.argv[1])):
        os.close(kept.pop())
try:
    hvd.init()
except hvd.HvdliteError as error:
    for each in kept:
        os.close(each)
    print(error, flush=True)
    sys.exit(3)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("free", [0, 1, 4])
def test_an_init_without_free_descriptors_says_so_and_what_to_do(launch, free):
    job = launch("-np", "2", sys.executable, "-c", WITHOUT_FILES, str(free))
    code, out, err = job.ended(PATIENCE_S)
    assert code == 3, err.decode()
    what = "this process has too many open files: close some, or raise the limit with ulimit -n"
    assert f"[0]<stdout>:hvd.init() failed: {what}" in out.decode().splitlines(), err.decode()
    job.assert_gone()
