"""An `init` that fails, wherever that is, leaves nothing behind; the next one works."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.victims import run_plainly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Where it fails: what is called there.
STAGES = (
    "hvdlite.runtime.bootstrap.placements_to_topology",
    "hvdlite.runtime.bootstrap.ShmEngineFactory",
    "hvdlite.shm.setup._make_own",
    "hvdlite.shm.setup._make_context",
    "hvdlite.shm.shm_factory.ShmEngine",
    "hvdlite.runtime.bootstrap.choose_levels",
    "hvdlite.runtime.bootstrap.make_controller",
    "hvdlite.control.connect.ControlClient",
    "hvdlite.control.control_client.ControlClient.open_channel",
    "hvdlite.control.control_client.ControlClient.start",
    "hvdlite.timeline.session.start",
    "hvdlite.timeline.session._begin",
    "hvdlite.runtime.bootstrap.Registry",
    "hvdlite.runtime.process_set_registry.Registry.add",
)
# Where an error of one rank is that rank's alone, and the others' comes from what it leaves.
PROGRAM = """
import gc, importlib, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import hvdlite as hvd

directory, stages = Path(sys.argv[1]), sys.argv[2:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
meetings = 0
TIMEOUT_S = 6  # what one rank waits for the other where it learns nothing of its end

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
    hvd.init(timeout_s=TIMEOUT_S, process_sets=[hvd.ProcessSet([0])])
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


@pytest.mark.parametrize("stage", STAGES)
def test_an_init_that_fails_leaves_nothing_and_the_next_one_works(stage: str, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # A timeline, so that there is one to begin.
    timeline = {"HVDLITE_TIMELINE": str(tmp_path / "timeline.json")}
    for outcome in run_plainly(2, [str(program), str(tmp_path), stage], tmp_path, timeout_s=200, **timeline):
        assert outcome.exit_code == 0, outcome.output
        assert "all of it" in outcome.output
