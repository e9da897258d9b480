"""
Opens gloo process groups on authenticated connections: each is proven to lead to a rank of this job.

Gloo's listener accepts any peer that connects first and sends a number that is easy to guess. So groups are opened in
these steps:

1. All ranks wait in the store until every one is ready (`wait_for_all`). So a stranger has only a few milliseconds to
   connect.
2. Gloo listens and connects (`make_gloo`, called within `open_proven`), and then nobody else gets in (`gloo_sockets`).
3. Each rank sends each other rank a signature with the job's key, which a stranger cannot make.

Gloo connects to all ranks before it returns a process group. It waits until its timeout for one that has ended after
it told the others its address, or whose host cannot be reached. `Connecting` ends that wait. There is one for each
attempt of an elastic job, given up once the generation is revoked, and one for what is opened later in the world.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, Store

from ..errors import CommunicationError
from ..signing import TAG_BYTES, Signer
from .gloo_sockets import Connections, OpeningGroups, make_devices, while_connecting
from .work import Ends

# The longest that ranks may be apart after all have connected, even where many share few cores.
_PROOF_S, _PROOF_S_PER_RANK = 15.0, 0.25

_PAUSE_S = 0.005
# Gloo fails within milliseconds; a thread that gets no processor for longer is left alone.
_MOST_GIVING_UP_S = 5.0

# A process group of torch.distributed, or its gloo backend alone.
ProcessGroup = TypeVar("ProcessGroup")


class InitTimeout:
    """The time that ranks wait for each other: one deadline for all of `hvd.init`, later a timeout for each wait."""

    def __init__(
        self, timeout: timedelta, clock: Callable[[], float] = time.monotonic, limit: timedelta | None = None
    ) -> None:
        """`hvd.init` begins now, and may take as long as ``limit``, or else as long as ``timeout``."""
        self.timeout = timeout
        self.limit = timeout if limit is None else min(timeout, limit)
        self._clock = clock
        self._until_s: float | None = clock() + self.limit.total_seconds()

    def left(self) -> timedelta:
        """Returns the timeout of the next wait: what remains, but at least 1 s (or ``timeout``, if that is shorter)."""
        if self._until_s is None:
            return self.timeout
        least_s = min(1.0, self.timeout.total_seconds())
        return timedelta(seconds=max(least_s, self._until_s - self._clock()))

    def end_of_init(self) -> None:
        """End the deadline of `hvd.init`: from now on each wait has the full timeout."""
        self._until_s = None


@dataclass(frozen=True, slots=True)
class ConnectingRanks:
    """The ranks that open process groups together.

    ``names`` are the ranks as messages name them, and ``numbers`` the global ranks, by default the same. Only these
    ranks have ``store`` and the key of ``signer``. ``init_timeout`` is how long they wait for each other, unless one of
    them is among ``ends``.
    """

    store: Store
    signer: Signer
    rank: int
    names: tuple[str, ...]
    init_timeout: InitTimeout
    ends: Ends = field(default_factory=Ends)
    numbers: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.names)

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str) -> ConnectingRanks:
        """Returns some of the ranks, with this one as ``group_rank``; see `EngineFactory.among`."""
        return replace(
            self,
            store=PrefixStore(f"hvdlite.{token}", self.store),
            signer=self.signer.derive("among", token),
            rank=group_rank,
            names=tuple(self.names[each] for each in group_ranks),
            numbers=tuple(self.global_ranks[each] for each in group_ranks),
        )

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return self.numbers or tuple(range(self.size))

    def wait_until_set(self, store: Store, keys: Sequence[str]) -> None:
        """Block until the ranks have set these keys; a CommunicationError if one of them has ended or failed."""
        self.ends.wait_until_set(store, keys, self.init_timeout.left(), self.global_ranks, self.names)

    def store_wait(self) -> Callable[[Store, Sequence[str], timedelta], None]:
        """Returns what waits like `wait_until_set` in the operation of this thread, for gloo's threads."""
        operation = self.ends.operation
        return lambda store, keys, timeout: self.ends.wait_until_set(
            store, keys, timeout, self.global_ranks, self.names, operation
        )


def wait_for_all(ranks: ConnectingRanks, label: str) -> None:
    """Wait until all ranks have called this with this label; a CommunicationError names those that did not."""
    keys = [f"{label}/here/{group_rank}" for group_rank in range(ranks.size)]
    try:
        ranks.store.set(keys[ranks.rank], "1")
        ranks.wait_until_set(ranks.store, keys)
    except CommunicationError as error:
        raise type(error)(f"{ranks.names[ranks.rank]} could not connect to the other ranks: {error}") from error
    except RuntimeError as error:
        late = []
        with contextlib.suppress(RuntimeError):
            late = [name for name, key in zip(ranks.names, keys, strict=True) if not ranks.store.check([key])]
        raise CommunicationError(
            f"{ranks.names[ranks.rank]} could not connect to the other ranks within the timeout_s of hvd.init(). "
            f"Missing: {', '.join(late[:8]) or f'unknown ({error})'}; look at their output for the cause"
        ) from error


def open_proven(
    make: Callable[[Connections], ProcessGroup],
    discard: Callable[[ProcessGroup], object],
    ranks: ConnectingRanks,
    label: str,
    on_connected: Callable[[Connections], object] = lambda _: None,
) -> tuple[ProcessGroup, Connections]:
    """Open a process group with ``make``, and prove that its CPU connections lead to these ranks.

    Returns the group and its connections, which the caller must shut down before it destroys the group. If other
    threads of this process may open gloo groups at the same time, ``make`` must use `make_gloo`. ``on_connected`` gets
    the connections before they are proven. If the proof fails, the group goes to ``discard``, and a CommunicationError
    names the ranks whose connections lead elsewhere.

    Every rank must call it soon after `wait_for_all`, with a label that these ranks have not used before.
    """
    group: ProcessGroup | None = None
    with ranks.ends.connecting(ranks.global_ranks, ranks.names, ranks.rank):
        try:
            with while_connecting() as connections:
                group = make(connections)
            connections.belong_to(group, ranks.rank, ranks.size)
            on_connected(connections)
            for device in range(connections.devices):  # each collective uses the next one
                _prove(group, ranks, f"{label}/{device}")
        except BaseException:
            if group is not None:
                try:
                    connections.end_waits()
                finally:
                    discard(group)
            raise
    return group, connections


def make_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, connections: Connections
) -> dist.ProcessGroupGloo:
    """Returns a gloo backend connected to the other ranks, and adds its event loops to ``connections``.

    It takes the interfaces of GLOO_SOCKET_IFNAME if that is set, as `dist.ProcessGroupGloo` does.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's own stubs lack it
    options._devices = make_devices(connections)
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _prove(group: Any, ranks: ConnectingRanks, label: str) -> None:
    own, others = ranks.rank, range(ranks.size)
    signatures = b"".join(ranks.signer.sign("gloo", label, own, other) for other in others)
    received = torch.zeros(ranks.size * TAG_BYTES, dtype=torch.uint8, device="cpu")
    counts = [TAG_BYTES] * ranks.size
    patience_s = _PROOF_S + _PROOF_S_PER_RANK * ranks.size
    options = AllToAllOptions()
    options.timeout = timedelta(seconds=patience_s)
    failure = None
    try:
        sent = torch.frombuffer(bytearray(signatures), dtype=torch.uint8)
        group.alltoall_base(received, sent, counts, counts, options).wait()
    except RuntimeError as error:
        failure = error
    data = bytes(received.tolist())
    came = [data[other * TAG_BYTES : (other + 1) * TAG_BYTES] for other in others]
    strange = [other for other in others if not ranks.signer.is_signed(came[other], "gloo", label, other, own)]
    if not strange and failure is None:
        return
    who = ", ".join(ranks.names[group_rank] for group_rank in strange[:8]) or "another rank"
    if any(any(came[other]) for other in strange):
        seen = "the data received from there are not signed with this job's key"
    else:
        seen = f"no data signed with this job's key arrived within {patience_s:g} s"
    line = "" if failure is None else f" ({str(failure).strip().partition(chr(10))[0]})"
    raise CommunicationError(
        f"{ranks.names[own]}: the connection to {who} does not lead there: {seen}. Either that rank has ended: "
        "look for its own error. Or another program connected to this host's port first: start the job again, and "
        f"check who else can reach this network{line}"
    ) from failure


class Connecting:
    """The gloo groups that this process is opening in one generation. Any thread may call its methods."""

    def __init__(self, size: int) -> None:
        """``size`` is the number of ranks."""
        self._size = size
        self.sockets = OpeningGroups()
        self._over = threading.Event()
        self._end: list[Callable[[], None]] = []
        self.is_late = False
        self.addresses_by_rank: dict[int, tuple[str, ...]] = {}
        """The `own_addresses` of ranks on several hosts; empty if they do not need these."""

    def on_give_up(self, end: Callable[[], None]) -> None:
        """Has `give_up` call ``end``, too: it ends operations of a group that is connected already."""
        self._end.append(end)

    def close(self) -> None:
        """Has `give_up` return, and do nothing any more: all is connected, or has failed."""
        self._over.set()

    def give_up(self) -> None:
        """Makes gloo fail to connect, now and until `close`, for which this waits."""
        self._give_up_while(lambda: True)

    def give_up_begun(self) -> None:
        """Makes gloo fail to connect where it does so now; returns once it has failed, or at `close`.

        Once the generation has been revoked gloo begins no more, since it cannot read from the ranks' store.
        """
        until_s = time.monotonic() + _MOST_GIVING_UP_S
        try:
            begun = self.sockets.listeners()
        except OSError:  # too many open files
            return
        self._give_up_while(lambda: bool(begun & self.sockets.listeners()) and time.monotonic() < until_s, begun)

    @contextlib.contextmanager
    def for_at_most(self, limit_s: float) -> Iterator[None]:
        """A context in which gloo connects, and fails after ``limit_s``; `is_late` then says so."""
        is_over = threading.Event()

        def give_up_late() -> None:
            if not is_over.wait(limit_s):
                self.is_late = True
                self._give_up_while(lambda: not is_over.is_set())

        limit = threading.Thread(target=give_up_late, name="hvdlite-connecting", daemon=True)
        limit.start()
        try:
            yield
        finally:
            is_over.set()
            limit.join()

    def _give_up_while(self, is_needed: Callable[[], bool], of: Collection[int] | None = None) -> None:
        let_in: set[int] = set()
        while not self._over.wait(_PAUSE_S):
            with contextlib.suppress(OSError):  # such as too many open files: then it tries again
                if not is_needed():
                    return
                self.sockets.end_waits(self._size, let_in, of)
            while self._end:
                self._end.pop()()
