"""
`ProcessState`: everything that hvdlite keeps in this process from one world to the next.

    init ── meeting place ── the same as before: its store, and the number of this meeting
                          └─ another: the store of before is let go, and meetings are counted anew
    shutdown ── variables of the environment that were set for the world are taken back

After `hvd.shutdown` a process may be another rank, among others, who meet elsewhere: RANK, WORLD_SIZE, MASTER_PORT or
the launcher's store have changed. What must not reach that world is here:

    what               kept while                            then
    store at           inits meet there, in the same role    let go, before another is opened: a server has a port
    MASTER_ADDR                                              and a thread
    meetings so far    the process lives, by place: keys of  nothing: the ranks of a place have met there equally
                       earlier ones stay in a store          often, wherever else each of them has been
    ... in the pro-    that group lives                      dropped with it
    gram's own group
    connection of PMI  PMI_FD is the same                    the launcher is told, and it is closed
    GLOO_SOCKET_IFNAME the world lives, unless the user      unset
                       has set it

Not here, since it is right in any world: hooks (tracebacks, fork, the interpreter's end), the log's handler (which each
init sets anew), numbers that only tell things of this process apart, the thread that closes what the garbage collector
finds, compiled kernels, and `LauncherStore` objects, which C++ may still hold. The current world itself is the one
module variable of `runtime.world`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

_INTERFACE = "GLOO_SOCKET_IFNAME"

Thing = TypeVar("Thing")


class ProcessState:
    """What outlives a world, and what becomes of it in the next. Used by `init` and `shutdown`, one at a time."""

    def __init__(self) -> None:
        # By what it is: the key that it was made for, the thing, and what ends it.
        self._kept: dict[str, tuple[Hashable, Any, Callable[[Any], None]]] = {}
        self._meetings: dict[Hashable, Iterator[int]] = {}
        self._meetings_in: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
        self._own_interface: str | None = None

    def keep(
        self, what: str, key: Hashable, make: Callable[[], Thing], end: Callable[[Thing], None] = lambda _: None
    ) -> Thing:
        """The store or connection that was kept under this key, else a new one; one of another key is ended before."""
        known = self._kept.get(what)
        if known is None or known[0] != key:
            del known
            if what in self._kept:
                _, thing, ends = self._kept.pop(what)
                ends(thing)
                del thing, ends
            self._kept[what] = (key, make(), end)
        kept: Thing = self._kept[what][1]
        return kept

    def next_meeting(self, place: Hashable) -> int:
        """How often this process has met others at a place before."""
        return next(self._meetings.setdefault(place, itertools.count()))

    def next_meeting_in(self, group: dist.ProcessGroup) -> int:
        """How often it has met those of a default group of the program's, whatever worlds each was in before."""
        return next(self._meetings_in.setdefault(group, itertools.count()))

    def choose_interface(self, interface: str | None) -> None:
        """Have gloo listen on an interface, if there is one, until `world_left`; unless the user has chosen."""
        if interface is not None and _INTERFACE not in os.environ:
            os.environ[_INTERFACE] = self._own_interface = interface

    def world_left(self) -> None:
        """Unset what was set for the world alone."""
        interface, self._own_interface = self._own_interface, None
        if interface is not None and os.environ.get(_INTERFACE) == interface:
            del os.environ[_INTERFACE]
