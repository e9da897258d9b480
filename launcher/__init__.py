"""hvdlite-run: starts one command on many hosts, shows its output, and ends all of it when one worker fails.

    cli ──► plan ──► job (or check) ──► agents ──► host (an agent on each host) ──► workers
    one queue of events: agents, screen, signals ──► job
    workers ──► store.relay in each agent ──► store.server in the launcher, to find each other

Packages and modules import only what stands before them, and within a package its own docstring has the order:

    version < errors < system < protocol < store < plan < host < agents < workers < screen < status
            < elastic < job < check < cli

No module imports torch or hvdlite, so the launcher starts fast and runs where torch is not installed. Besides the
standard library it needs psutil; `cli.config_file` needs PyYAML, `cli.caller` cloudpickle, and `status.live_view`
rich. The only code that it shares with the library is `hvdlite_wire`. What both must agree on is in there, in
`plan.worker_environment` (a worker's environment) and in `cli.function_runner` (the call of a function).
"""

from __future__ import annotations

from .errors import JobError

# Type checkers know this name. `__main__` has to be reached fast, and importing `typing` takes a while.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeVar

    Returned = TypeVar("Returned")

__all__ = ["JobError", "run"]


def run(
    func: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | Sequence[str] | None = None,
    hostfile: str | None = None,
    environment: Mapping[str, str | None] | None = None,
    **flags: object,
) -> list[Returned]:
    """Calls ``func(*args, **kwargs)`` in ``np`` workers and returns a list of what each returned, by rank.

    In an elastic job (``min_np``) these are the ranks of the last generation.

    ``hosts``, ``hostfile`` and all other ``flags`` are hvdlite-run's flags, as in ``grace=10`` or ``verbose=True``.
    ``environment`` is its ``-x``: a mapping of variables for the workers, where None means the caller's value. As
    with hvdlite-run, workers have the caller's environment and working directory, and their output is shown. They have
    no standard input.

    ``func``, its arguments and what it returns are pickled by cloudpickle, so lambdas and functions defined in a
    notebook work. `run` may be called from any thread. It returns or raises once no process of the job is left.

    Raises the exception of the worker that failed first; its ``__cause__`` has the rank and the traceback. Raises
    `JobError` for any other failure of the job, and if the exception cannot be unpickled here. Raises
    `pickle.PicklingError` for what cannot be pickled, and ValueError or TypeError for wrong flags or arguments.
    """
    # Imported here, since hvdlite-run and its agents import this package too and do not need it.
    from .cli.caller import run as run_function  # noqa: PLC0415

    given = {"np": np, "hosts": hosts, "hostfile": hostfile, "environment": environment}
    return run_function(func, args, kwargs, {**given, **flags})
