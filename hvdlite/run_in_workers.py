"""
`run`: the program hvdlite-run from Python, for who imports hvdlite anyway.

The one place where the library reaches for the launcher, and only when it is called.
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
    """Call ``func(*args, **kwargs)`` in ``np`` new workers, and give what it returned in each, by rank.

    It is `hvdlite_launcher.run`, with the same arguments: ``hosts``, ``hostfile``, ``environment`` and all flags of
    hvdlite-run. ``func`` calls `init` if its workers are to talk to each other; the caller need not, and is none of
    them.
    """
    # mypy knows it by the name of its directory.
    import hvdlite_launcher  # type: ignore[import-not-found]  # noqa: PLC0415

    returned: list[Returned] = hvdlite_launcher.run(func, args, kwargs, np=np, **flags)
    return returned
