"""
`Connecting`: what gloo does while the ranks of an elastic job's generation connect, and the way to end it.

    hvd.init ── gloo connects to each rank in turn ── Connecting ── silences() ── hvdlite-run, which gives hosts up
                                                              └─ give_up() ◄── the generation is revoked

Gloo connects to all ranks before it returns a process group. It waits until its timeout for one that has ended after
it told the others its address, or whose host cannot be reached, and offers no way to end that wait. So `give_up` ends
it from outside, by what gloo takes for answers: where it connects, the attempts fail at once, and where it waits to be
connected to, this process connects to itself. `gloo.open_proven` then finds that such a group is of no use.

`runtime.elastic_world` makes one for each attempt of an elastic job, and one for the groups that are opened later in
the world, which `runtime.world` gives up at the generation's end. Where another host refuses connections, gloo fails at
once on the rank that connects: `hvdlite_wire.field_types.Refusals` tell hvdlite-run so.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator

from .gloo import Connections, loops_connecting, make_devices, sockets_of
from .keepalive import address_in, is_probed, probe, silence_s

# Of TCP_INFO (linux/tcp.h), whose first byte is the state.
_ESTABLISHED, _SYN_SENT = 1, 2

_INODE = 9  # the place in a line of /proc/net/tcp

_PAUSE_S = 0.005
_OWN_CONNECTION_S = 1.0
# Gloo fails within milliseconds; a thread that gets no processor for longer is left alone.
_MOST_GIVING_UP_S = 5.0

# What gloo's pairs send first: the number of the pair, which is that of the rank in a group with a device of its own.
_PAIR = struct.Struct("=Q")


def own_addresses() -> tuple[str, ...]:
    """Returns the addresses at which gloo listens in this process, for which it makes devices that it drops again."""
    connections = Connections()
    devices = make_devices(connections)
    found = [
        address_in(each.getsockname()) for loop in connections.loops for each, _, listens in sockets_of(loop) if listens
    ]
    del devices
    return tuple(sorted(set(found)))


class Connecting:
    """The gloo groups that this process is opening in one generation. Any thread may call its methods."""

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``size`` is the number of ranks."""
        self._size = size
        self._clock = clock
        self._over = threading.Event()
        self._unanswered_since: dict[str, float] = {}
        self._end: list[Callable[[], None]] = []
        self.is_late = False
        """Whether the time of `for_at_most` was over before the ranks had connected."""
        self.addresses_by_rank: dict[int, tuple[str, ...]] = {}
        """What `own_addresses` has returned on the ranks of several hosts; empty if they do not need it."""

    def on_give_up(self, end: Callable[[], None]) -> None:
        """Has `give_up` call ``end``, too: it ends operations of a group that is connected already."""
        self._end.append(end)

    def close(self) -> None:
        """All is connected, or has failed: `give_up` returns, and does nothing any more."""
        self._over.set()

    def give_up(self) -> None:
        """Makes gloo fail to connect, now and until `close`, for which this waits."""
        self._give_up_while(lambda: True)

    def give_up_begun(self) -> None:
        """Makes gloo fail to connect where it does so now; returns once it has failed, or at `close`.

        Once the generation has been revoked gloo begins no more, since it cannot read from the ranks' store.
        """
        until_s = self._clock() + _MOST_GIVING_UP_S
        self._give_up_while(lambda: bool(loops_connecting()) and self._clock() < until_s)

    @contextlib.contextmanager
    def for_at_most(self, limit_s: float) -> Iterator[None]:
        """A context in which gloo connects, and fails after ``limit_s``: by itself it takes five times its timeout."""
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

    def _give_up_while(self, is_needed: Callable[[], bool]) -> None:
        let_in: set[int] = set()
        while is_needed() and not self._over.wait(_PAUSE_S):
            for each, inode, listens in _sockets():
                with contextlib.suppress(OSError):  # gloo has closed it meanwhile
                    if listens and inode not in let_in:
                        let_in.add(inode)
                        self._connect_to_itself(each)
                    elif not listens and _state(each) == _SYN_SENT:
                        # Gloo tries again a few times.
                        each.shutdown(socket.SHUT_RDWR)
            while self._end:
                self._end.pop()()

    def _connect_to_itself(self, listener: socket.socket) -> None:
        for number in range(self._size):
            with socket.socket(listener.family) as own:
                own.settimeout(_OWN_CONNECTION_S)
                own.connect(listener.getsockname())
                own.sendall(_PAIR.pack(number))

    @property
    def addresses(self) -> tuple[str, ...]:
        """This end's addresses, at which gloo listens; none before it does."""
        found = set()
        for each, _, listens in _sockets():
            with contextlib.suppress(OSError):
                if listens:
                    found.add(address_in(each.getsockname()))
        return tuple(sorted(found))

    def silences(self) -> dict[str, float]:
        """Returns for how many seconds nothing has come from each other address, 0 or more, as far as is known.

        That is so where the other kernel has not answered since a connection was begun, and where it does not answer
        probes. A rank that computes, is stopped, or waits for another is not silent.
        """
        now_s = self._clock()
        longest: dict[str, float] = {}
        unanswered: set[int] = set()
        for each, inode, listens in _sockets():
            with contextlib.suppress(OSError):
                state = None if listens else _state(each)
                if state == _SYN_SENT:
                    unanswered.add(inode)
                elif state == _ESTABLISHED and not is_probed(each):
                    probe(each)
                elif state == _ESTABLISHED:
                    other = address_in(each.getpeername())
                    longest[other] = max(silence_s(each), longest.get(other, 0.0))
        # By the address, since gloo begins another attempt with another socket.
        self._unanswered_since = {other: self._unanswered_since.get(other, now_s) for other in _others(unanswered)}
        return longest | {other: now_s - since_s for other, since_s in self._unanswered_since.items()}


def _sockets() -> Iterator[tuple[socket.socket, int, bool]]:
    """Yields the sockets of the groups that are being opened, as `gloo.sockets_of` does."""
    for loop in loops_connecting():
        yield from sockets_of(loop, also_unconnected=True)


def _state(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _others(unanswered: Collection[int]) -> set[str]:
    """Returns the addresses to which these sockets begin to connect: only the kernel's table has them by then."""
    found = set()
    for name in ("tcp", "tcp6") if unanswered else ():
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}", encoding="ascii") as table:
            for line in itertools.islice(table, 1, None):
                _, _, other, state, *_ = words = line.split()
                if int(state, 16) == _SYN_SENT and int(words[_INODE]) in unanswered:
                    # Words of 32 bits, as they are in memory.
                    digits = other.partition(":")[0]
                    address = b"".join(
                        struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8)
                    )
                    family = socket.AF_INET if name == "tcp" else socket.AF_INET6
                    found.add(address_in((socket.inet_ntop(family, address), 0)))
    return found
