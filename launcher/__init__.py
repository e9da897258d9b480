"""hvdlite-run: starts one command on many hosts, shows what it prints, and ends all of it when one part fails.

    cli ── plan (hosts → slots → ranks, environment) ── agents ── one agent per host (`host`) ── workers
               job ◄── one queue of typed events ◄── agents, screen, signals
             store ◄── each agent's relay ◄── workers that look for each other

Packages and modules import only what stands before them, and within a package its own docstring has the order:

    version < errors < system < wire < store < plan < host < agents < job < check < cli < function

Nothing here imports torch or hvdlite: the launcher answers at once, and runs where torch is not installed.
Beyond the standard library it needs psutil, `cli.config_file` PyYAML when a file is given, and `function.caller`
cloudpickle. What it shares with the library is no code but the environment of a worker (`plan.worker_environment`),
what a worker asks the store (`wire.worker_requests`) and what it calls (`function.function_messages`).
"""

from __future__ import annotations

from .errors import JobError

# By this name type checkers know it. The module `typing` takes a while, in which Ctrl-C is a traceback: see `__main__`.
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
    """Call ``func(*args, **kwargs)`` in ``np`` workers, and give what it returned in each, by rank.

    ``hosts``, ``hostfile`` and all other ``flags`` are hvdlite-run's, as in ``grace=10`` or ``verbose=True``;
    ``environment`` is its ``-x``: variables for the workers, those that are None with the value they have here.
    Workers have what the caller has otherwise, but for standard input, and what they print is shown.

    ``func``, what it is given and what it returns are pickled (by cloudpickle: lambdas and what is defined in a
    notebook will do). It may be called from any thread, and returns or raises once nothing of the job is left.

    Raises the exception of the worker that failed first, whose ``__cause__`` tells rank and traceback; `JobError`
    where a worker ended otherwise, or its exception cannot be unpickled here; `pickle.PicklingError`, ValueError or
    TypeError for what cannot be sent or is no flag.
    """
    # Here, as hvdlite-run and its agents import this package too, and need none of it.
    from .function.caller import run as run_function  # noqa: PLC0415

    given = {"np": np, "hosts": hosts, "hostfile": hostfile, "environment": environment}
    return run_function(func, args, kwargs, {**given, **flags})
