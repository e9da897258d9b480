"""
`ProcessState`: what hvdlite keeps in this process after `hvd.shutdown`, for the next `hvd.init` (but for optimizers).

That may have other values of RANK, WORLD_SIZE, MASTER_PORT or the launcher's store. `ProcessState.keep` holds:

- the store that rank 0 serves, while its address, this rank and (but on rank 0) the number of ranks are the same. It is
  closed before another one is opened, because a server has a port and a thread.
- the client of hvdlite-run's store, and a `LauncherStore`, which is never freed: one for all worlds.
- the connection to PMI, and gloo's addresses in an elastic job, while PMI_FD or GLOO_SOCKET_IFNAME is the same.
- until the process ends: the thread that answers hvdlite-run, and the shared memory of steps that survive losses.

`runtime.world` has the one object. What is right in any world is elsewhere: hooks (tracebacks, fork, the interpreter's
end), the log's handler, counters for unique names, compiled kernels, and `LauncherStore` objects, which C++ may still
hold. The current world is a module variable of `runtime.world`.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from hvdlite_wire.store_requests import NewWorkerPolicy, RankAssignment

from .. import forks
from .elastic_store import Keepalive
from .placement import GivenPlace

_INTERFACE = "GLOO_SOCKET_IFNAME"

Thing = TypeVar("Thing")


class ProcessState:
    """The state that outlives a world. `init` and `shutdown` use it, never at the same time."""

    def __init__(self) -> None:
        # By ``what`` of `keep`: the key, the object, and the function that closes it.
        self._kept: dict[str, tuple[Hashable, Any, Callable[[Any], None]]] = {}
        # By store, or by process group of the program's: kept, since a store has the keys of earlier inits.
        self._inits: dict[Hashable, Iterator[int]] = {}
        self._inits_in: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
        self._own_interface: str | None = None
        self.generation = 0
        """The last generation of an elastic job in which this process was given a rank; 0 if there is none."""
        self.assignment: RankAssignment | None = None
        """Its rank in that generation."""
        self.keepalive: Keepalive | None = None
        """The connections to ranks on other hosts, under hvdlite-run; None between worlds."""
        self.connects_since_s: float | None = None
        """When it began, in `hvd.init`, to wait for the other ranks; None if it does not."""
        self.steps: Counter[str] = Counter()
        """The steps that its optimizers took in the worlds that it has left, by their names."""
        self.samples: int | None = None
        """The samples that it has processed; None if its program does not tell."""
        self.is_elastic = False
        """Whether the program has entered a function of `hvd.elastic.run`, and so can go on in another world."""
        self.has_state = False
        """Whether it has what the ranks of an elastic job train: it was in the first generation, or got it since."""
        self.has_stood_by = False
        """Whether it has been in a world without other ranks, before it was given a rank."""
        self.has_told = False
        """Whether it has told new workers that they can join its program."""
        self.newcomers = NewWorkerPolicy.WELCOME
        """What this process says of workers that were in no generation, when it asks for the next."""
        self.given_place: GivenPlace | None = None
        """The rank that `take_place` has given to this process; None where a launcher's variables say it."""
        self.taken: tuple[forks.Parent, dict[str, str]] | None = None
        """In a forked child: the rank that it was forked from, and its variables, which give it that rank's place."""
        self.init_arguments: dict[str, Any] = {}
        """The arguments of the last `hvd.init`, with which `hvd.elastic.run` calls it again."""

    def keep(
        self, what: str, key: Hashable, make: Callable[[], Thing], end: Callable[[Thing], None] = lambda _: None
    ) -> Thing:
        """Returns the kept object if it has this key; otherwise makes and keeps a new one.

        ``what`` is the kind, such as "store"; one object of each kind is kept. The old object is closed with its own
        ``end`` before ``make`` is called.
        """
        if what in self._kept and self._kept[what][0] != key:
            _, thing, ends = self._kept.pop(what)
            ends(thing)
            del thing, ends
        if what not in self._kept:
            self._kept[what] = (key, make(), end)
        kept: Thing = self._kept[what][1]
        return kept

    def kept(self, what: str) -> Any:
        """Returns the object of this kind that is kept now; None if there is none."""
        known = self._kept.get(what)
        return None if known is None else known[1]

    def next_init(self, place: Hashable) -> int:
        """Returns how often this process has called init at this place before (a store's address), and counts it."""
        return next(self._inits.setdefault(place, itertools.count()))

    def next_init_in(self, group: dist.ProcessGroup) -> int:
        """Returns how often this process has called init within this default group of the program's, and counts it."""
        return next(self._inits_in.setdefault(group, itertools.count()))

    def choose_interface(self, interface: str | None) -> None:
        """Sets GLOO_SOCKET_IFNAME until `world_left`; does nothing with None, or if the user has set it."""
        if interface is not None and _INTERFACE not in os.environ:
            os.environ[_INTERFACE] = self._own_interface = interface

    def world_left(self) -> None:
        """Unsets GLOO_SOCKET_IFNAME if `choose_interface` has set it, and forgets the world's connections."""
        self.keepalive = None
        interface, self._own_interface = self._own_interface, None
        if interface is not None and os.environ.get(_INTERFACE) == interface:
            del os.environ[_INTERFACE]
