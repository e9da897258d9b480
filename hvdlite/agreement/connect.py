"""
How every rank comes to a connection to rank 0, and so to its conductor.

    rank 0 listens ── its address and a secret, to all by the group ── the others connect ── Negotiator

Under hvdlite-run on one host it is a Unix socket in the job's private directory. Else it is a port that the system
chooses, on loopback where all ranks are on one host, on the address by which gloo is reached where they are not; it is
closed when all ranks have come. The secret travels as gradients do.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from ..channels.collective import Group
from ..environment import Environment
from ..errors import CommunicationError
from ..meeting.address import ELSEWHERE, LOOPBACK, address_of, own_address
from .conductor import Conductor
from .coordinator import Coordinator
from .in_order import InOrder
from .mailbox import Mailbox
from .negotiation import Negotiation
from .negotiator import WATCH_S, Negotiator
from .stall import StallRules


def make_conductor(group: Group, nodes: Sequence[str], environment: Environment, timeout_s: float) -> Conductor:
    """This rank's conductor; every rank must call it. ``nodes`` tells the ranks' hosts apart."""
    if group.size == 1:
        return InOrder(1)
    negotiator = _connect(group, nodes, environment, timeout_s)
    try:
        if not environment.check:
            # Nothing is negotiated, but who has ended is told.
            negotiator.start()
            return InOrder(group.size, negotiator)
        negotiator.open_channel(group)
        negotiator.start()
    except BaseException:
        negotiator.close()
        raise
    return negotiator


def _connect(group: Group, nodes: Sequence[str], environment: Environment, timeout_s: float) -> Negotiator:
    if group.rank == 0:
        if not environment.check:
            return _lead(group, nodes, StallRules(None, None, timeout_s))
        warn_after_s = environment.stall_warning_s if environment.stall_check else None
        return _lead(group, nodes, StallRules(warn_after_s, environment.stall_shutdown_s, timeout_s))
    (address, secret), *_ = group.all_gather_json(None, "hvd.init()")
    return Negotiator(Mailbox(_reach(address, secret, group, timeout_s)), group, None)


def _lead(group: Group, nodes: Sequence[str], stall: StallRules) -> Negotiator:
    listener = _listen(group, nodes)
    secret = secrets.token_hex(16)
    try:
        group.all_gather_json((listener.getsockname(), secret), "hvd.init()")
    except BaseException:
        listener.close()
        raise
    own_end, other_end = socket.socketpair()
    own_end.settimeout(WATCH_S)
    coordinator = Coordinator(Negotiation(group.hosts, stall), group.size, listener, secret)
    coordinator.add(0, Mailbox(other_end))
    coordinator.start()
    return Negotiator(Mailbox(own_end), group, coordinator)


def _listen(group: Group, nodes: Sequence[str]) -> socket.socket:
    backlog = max(128, group.size)
    is_one_host = len(set(nodes)) == 1
    job_dir = os.environ.get("HVDLITE_JOB_DIR", "")
    if is_one_host and os.path.isdir(job_dir):
        # No longer than the name of the store's socket beside it, which is known to fit.
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(job_dir, secrets.token_hex(3)[:5]))
        listener.listen(backlog)
        return listener
    address = LOOPBACK if is_one_host else _address_for_others(group.hosts)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def _address_for_others(hosts: Sequence[str]) -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    chosen = address_of(interface) if interface else own_address([*dict.fromkeys(hosts), *ELSEWHERE])
    try:
        # As gloo would do it.
        return chosen or socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise CommunicationError(
            f"hvd.init() failed on rank 0: it finds no address of its own that other hosts reach ({error}): set "
            "GLOO_SOCKET_IFNAME to the interface that leads to them"
        ) from error


def _reach(address: Any, secret: str, group: Group, timeout_s: float) -> socket.socket:
    connection = None
    try:
        if isinstance(address, str):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout_s)
            connection.connect(address)
        else:
            connection = socket.create_connection(address[:2], timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Mailbox(connection).send([group.rank, secret])
    except OSError as error:
        if connection is not None:
            connection.close()
        raise CommunicationError(
            f"hvd.init() failed on {group.describe_rank(group.rank)}: rank 0 cannot be reached at {address} ({error}): "
            "set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts"
        ) from error
    connection.settimeout(WATCH_S)
    return connection
