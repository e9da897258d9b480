"""`register`: what a worker's process does for hvdlite-run once it has imported torch, without a call of its program.

    import torch ── path/sitecustomize ──► register ─┬─ faulthandler ◄── the signal ── collect
                                                     │       └──► <job's directory>/r<pid>.stacks
                                                     └─ exit handler ──► worker.<number>.apart, or .met
    agent ── Exited(apart=True) ──► status.job_facts ── one warning at the job's end

On a signal the Python stacks are written, for reports on programs that do not call hvd.init(). From hvd.init() on,
`hvdlite.runtime.hang_report` answers in its place, and registers a file of its own.

At its end a process notes whether it trained a model of its own: one that no other rank knows of. It has trained if it
has made an optimizer of PyTorch's. It has met others if it has used the process groups of torch.distributed, or its
RPC, or MPI; a default group that was opened and never used is not enough, as Accelerate opens one beside training that
is not distributed. After `hvd.init` hvdlite is asked whether anything was exchanged since. A process that has trained
nothing, as one that evaluates its share of some files, leaves no note.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from hvdlite_wire.job_contract import JOB_DIR, STACKS_SIGNAL, WORKER, note_file, stacks_file


def register() -> None:
    """Registers the handlers, in the process that a worker's command has started, and not in those that it forks.

    Never raises: a program without reports is better than none.
    """
    job_dir, worker = os.environ.get(JOB_DIR), os.environ.get(WORKER, "")
    if not (job_dir and worker.isdecimal()) or _is_of_multiprocessing():
        return
    note_at_exit(job_dir, int(worker))
    _write_stacks_on_signal(job_dir)


def _write_stacks_on_signal(job_dir: str) -> None:
    import faulthandler  # noqa: PLC0415  # a process that is no worker does not pay for it
    import json  # noqa: PLC0415  # as above
    import signal  # noqa: PLC0415

    if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
        return
    try:
        # The handler writes to its descriptor as long as the process lives: faulthandler keeps the file.
        file = open(stacks_file(job_dir, os.getpid()), "w", encoding="utf-8")  # noqa: SIM115  # see above
        file.write(json.dumps({"libraries": _libraries()}) + "\n")
        file.flush()
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError):
        return


def _is_of_multiprocessing() -> bool:
    """Whether this is a process of multiprocessing's, such as a DataLoader's: there may be one more in each epoch."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _libraries() -> list[str]:
    """Returns how the paths of files begin that are not the user's."""
    import site  # noqa: PLC0415  # as above
    import sysconfig  # noqa: PLC0415

    paths = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths.update(site.getsitepackages(), [site.getusersitepackages()])
    if (torch := getattr(sys.modules.get("torch"), "__file__", None)) is not None:
        paths.add(os.path.dirname(torch))
    return sorted(os.path.join(path, "") for path in paths)


def note_at_exit(job_dir: str, worker: int) -> None:
    """Leaves the note when this process ends; not if its program has failed, nor in processes that it forks."""
    pid = os.getpid()

    def leave_note() -> None:
        if os.getpid() != pid or _is_independent() or getattr(sys, "last_value", None) is not None:
            return
        # A worker may run several programs, one after the other: one that has met others is enough.
        with contextlib.suppress(Exception):
            if _has_met():
                _touch(note_file(job_dir, worker, "met"))
            elif _has_trained():
                _touch(note_file(job_dir, worker, "apart"))

    atexit.register(leave_note)


def _is_independent() -> bool:
    """Whether the user has said, by --independent or its variable, that ranks are to train without each other."""
    return os.environ.get("HVDLITE_INDEPENDENT", "").strip().lower() in ("1", "true", "yes", "on")


def _touch(path: str) -> None:
    with open(path, "w"):
        pass


def _has_met() -> bool:
    library: Any = sys.modules.get("hvdlite.runtime.world")
    if library is not None and (has_exchanged := library.has_exchanged()) is not None:
        return bool(has_exchanged)
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    rpc: Any = sys.modules.get("torch.distributed.rpc")
    if "mpi4py.MPI" in sys.modules or getattr(rpc, "_init_counter", 0) > 0:
        return True
    if distributed is None:
        return False
    if (group := distributed.GroupMember.WORLD) is not None:
        backends = [group._get_backend(device) for device in group._device_types]
        counts = [backend._get_sequence_number_for_group() for backend in backends]
        return distributed.get_pg_count() > 1 or any(counts)
    # Both stay when a process group is destroyed.
    return any(getattr(distributed, name, None) is not None for name in ("_backend", "_default_pg_init_method"))


def _has_trained() -> bool:
    """Whether an optimizer was made: the first of each class marks its class's ``step``."""
    base: Any = getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", None)
    return base is not None and any(getattr(vars(each).get("step"), "hooked", False) for each in _with_subclasses(base))


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for each in base.__subclasses__():
        yield from _with_subclasses(each)
