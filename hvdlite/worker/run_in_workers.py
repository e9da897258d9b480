"""
The public function `run`: starts workers from Python as the program hvdlite-run does.

It calls `hvdlite_launcher.run`. This is the library's only import of the launcher, and it happens when `run` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Returned = TypeVar("Returned")


def run(
    func: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    **flags: Any,
) -> list[Returned]:
    """Call ``func(*args, **kwargs)`` in ``np`` new workers, and return its return values in the order of the ranks.

    It takes the arguments of `hvdlite_launcher.run`: ``hosts``, ``hostfile``, ``environment`` and all flags of
    hvdlite-run. ``func`` must call `init` if the workers are to communicate. The calling process is not one of the
    workers and need not call `init`.
    """
    # mypy sees the package under the name of its directory, `launcher`.
    import hvdlite_launcher  # type: ignore[import-not-found]  # noqa: PLC0415

    returned: list[Returned] = hvdlite_launcher.run(func, args, kwargs, np=np, **flags)
    return returned
