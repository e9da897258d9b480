"""
Where this process stands among the others: ranks, local ranks, cross ranks.

    launcher's variables ── Seat (what one process knows) ── all seats together ── Topology

Pure values and functions: nothing here talks to another process or to torch.

``rank`` is global, ``local_rank`` counts within a host, ``cross_rank`` among the hosts that have this
local rank.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import LaunchEnvironmentError


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank's place in the job, and the name of every rank's host (for messages)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Seat:
    """What one process knows of its own place before it has spoken to any other.

    ``node`` tells apart what counts as different hosts: usually the host's name, under torchrun the
    number of the agent, since two agents may share a machine.
    """

    rank: int
    size: int
    node: str
    host: str
    local_rank: int | None = None
    store_url: str | None = None


def read_seat(environ: Mapping[str, str]) -> Seat | None:
    """This process's seat as its launcher tells it; None where no launcher did.

    hvdlite-run's variables come first: a program may be started by it from within another launcher's job.
    """
    host = environ.get("HVDLITE_HOST") or socket.gethostname()
    if "HVDLITE_RANK" in environ:
        read = _Reader(environ, "hvdlite-run")
        return Seat(
            rank=read.number("HVDLITE_RANK", below="HVDLITE_SIZE"),
            size=read.number("HVDLITE_SIZE"),
            node=host,
            host=host,
            local_rank=read.number("HVDLITE_LOCAL_RANK", below="HVDLITE_LOCAL_SIZE"),
            store_url=read.text("HVDLITE_STORE"),
        )
    if "RANK" in environ and "WORLD_SIZE" in environ:
        read = _Reader(environ, "torchrun (or another launcher that sets RANK and WORLD_SIZE)")
        read.text("MASTER_ADDR")
        read.number("MASTER_PORT")
        local_rank = read.number("LOCAL_RANK") if "LOCAL_RANK" in environ else None
        return Seat(
            rank=read.number("RANK", below="WORLD_SIZE"),
            size=read.number("WORLD_SIZE"),
            node=environ.get("GROUP_RANK", host),
            host=host,
            local_rank=local_rank,
        )
    return None


def seats_to_topology(rank: int, seats: Sequence[Seat]) -> Topology:
    """The topology of ``rank``, given the seats of all ranks in rank order.

    A seat without a local rank is counted off among the ranks of its node.
    """
    local_ranks: list[int] = []
    members: dict[str, int] = {}
    for seat in seats:
        counted = members.get(seat.node, 0)
        members[seat.node] = counted + 1
        local_ranks.append(counted if seat.local_rank is None else seat.local_rank)
    mine = seats[rank]
    # Hosts in the order of their first rank, as the launcher numbers them.
    nodes_with_my_local_rank = list(
        dict.fromkeys(seat.node for seat, local in zip(seats, local_ranks, strict=True) if local == local_ranks[rank])
    )
    return Topology(
        rank=rank,
        size=len(seats),
        local_rank=local_ranks[rank],
        local_size=members[mine.node],
        cross_rank=nodes_with_my_local_rank.index(mine.node),
        cross_size=len(nodes_with_my_local_rank),
        hosts=tuple(seat.host for seat in seats),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one launcher's variables, and names the variable and the launcher where one is wrong."""

    environ: Mapping[str, str]
    launcher: str

    def text(self, name: str) -> str:
        try:
            return self.environ[name]
        except KeyError:
            raise LaunchEnvironmentError(
                f"{name} is not set, although this process seems to be started by {self.launcher}: "
                "start it through the launcher, or unset the launcher's variables"
            ) from None

    def number(self, name: str, *, below: str | None = None) -> int:
        text = self.text(name)
        if not text.isascii() or not text.isdigit():
            raise LaunchEnvironmentError(
                f"{name}={text!r} is not a number; {self.launcher} sets it, so it was changed on the way here"
            )
        value = int(text)
        if below is not None and value >= self.number(below):
            raise LaunchEnvironmentError(
                f"{name}={value} is not below {below}={self.environ[below]}: "
                f"both are set by {self.launcher}, so one of them was changed on the way here"
            )
        return value
