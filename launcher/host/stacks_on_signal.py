"""`register`: has a worker's Python stacks written on a signal, for reports on programs that do not call hvd.init().

    import torch ── path/sitecustomize ──► register ── faulthandler
                                               └─ training_notes.note_at_exit
    hvdlite-run ── collect ── the signal ──► <job's directory>/r<pid>.stacks

`import torch` calls it in workers and in Python programs that they start, by the `sitecustomize` in the directory
``path``, which hvdlite-run puts in front of their PYTHONPATH. In other processes it does nothing. From hvd.init() on,
`hvdlite.runtime.hang_report` answers in its place, and registers a file of its own.
"""

from __future__ import annotations

import os
import sys

from hvdlite_wire.job_contract import JOB_DIR, STACKS_SIGNAL, WORKER, stacks_file


def register() -> None:
    """Registers the handlers, in the process that a worker's command has started, and not in those that it forks.

    Never raises: a program without reports is better than none.
    """
    job_dir, worker = os.environ.get(JOB_DIR), os.environ.get(WORKER, "")
    if not (job_dir and worker.isdecimal()) or _is_of_multiprocessing():
        return
    from .training_notes import note_at_exit  # noqa: PLC0415  # a process that is no worker does not pay for it

    note_at_exit(job_dir, int(worker))
    if sys.platform == "linux":
        _write_stacks_on_signal(job_dir)


def _write_stacks_on_signal(job_dir: str) -> None:
    import faulthandler  # noqa: PLC0415  # as above
    import json  # noqa: PLC0415
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
