"""
Makes this rank's controller: connects it to rank 0, with the stall times of the `Environment`.

    rank 0 listens ── shares its address over the group ── the others connect ── both authenticate ── ControlClient

`runtime.make_world` calls `make_controller` in `hvd.init()`. Under hvdlite-run on one host, rank 0 listens on a Unix
socket in the job's private directory. Otherwise it listens on a port that the system chooses: on loopback if all ranks
are on one host, else on the address that gloo uses. It stops listening when all ranks are connected. To authenticate,
both ends prove that they have the key of the group's signer (see `handshake`).
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hvdlite_wire.job_contract import JOB_DIR
from hvdlite_wire.linux import LOOPBACK

from ..calls.controller import Controller
from ..calls.generation import Generation
from ..calls.handshake import CHALLENGE_BYTES, HandshakeClient
from ..calls.mailbox import DOWN, UP, Mailbox, mailbox_pair
from ..calls.messages import FromRank0, ToRank0, Welcome
from ..comm.gloo import InitTimeout
from ..comm.group import Group
from ..coordinator.stall import StallRules
from ..environment import Environment
from ..errors import CommunicationError
from ..rendezvous.host_address import address_for_others, no_connection_between
from ..signing import Signer
from .control_client import ControlClient
from .unchecked import UncheckedController

# Pause between two attempts to connect after rank 0 has closed the connection.
_AGAIN_S = 0.2


def make_controller(
    group: Group, generation: Generation, nodes: Sequence[str], environment: Environment, init_timeout: InitTimeout
) -> Controller:
    """Makes this rank's one controller for a generation; every rank must call it, and it waits for rank 0.

    ``nodes`` identify the ranks' hosts: equal entries are on one host. ``init_timeout`` is that of `hvd.init`, and how
    long the ranks' operations may stall.
    """
    if group.size == 1:
        return UncheckedController(1, generation.recorder)
    if group.rank == 0:
        warning_s = environment.stall_warning_s if environment.stall_check else None
        stall = StallRules(warning_s, environment.stall_shutdown_s, init_timeout.timeout.total_seconds())
        client, early = _lead(group, generation, nodes, stall, environment)
    else:
        address, *_ = group.all_gather_json(None, "hvd.init()")
        mailbox, welcome, early = _reach(address, group, init_timeout.left())
        try:
            client = ControlClient(mailbox, group, generation, None, welcome, measures_steps=environment.stragglers)
        except BaseException:
            mailbox.close()
            raise
    try:
        if environment.check:
            client.open_group(group)
        client.start(early)
    except BaseException:
        client.close()
        raise
    # Even where nothing is negotiated, the client learns which ranks have ended.
    return client if environment.check else UncheckedController(group.size, generation.recorder, client)


def _lead(
    group: Group, generation: Generation, nodes: Sequence[str], stall: StallRules, environment: Environment
) -> tuple[ControlClient, list[FromRank0]]:
    # Imported here, since on a host with many ranks the others need not wait for it.
    from ..coordinator.coordinator import Coordinator  # noqa: PLC0415
    from ..coordinator.negotiation import Negotiation  # noqa: PLC0415
    from ..coordinator.stragglers import StragglerWatch  # noqa: PLC0415

    listener = _listen(group, nodes)
    address = listener.getsockname()
    stragglers = StragglerWatch(group.hosts, environment.straggler_warning)
    coordinator = Coordinator(Negotiation(group.hosts, stall), group.size, stall, stragglers, listener, group.signer)
    own_end, other_end = mailbox_pair(Signer(secrets.token_bytes(32)))
    coordinator.add(0, other_end)
    coordinator.start()
    try:
        welcome, *early = own_end.receive()
        assert isinstance(welcome, Welcome), "the coordinator sends it first"
        group.all_gather_json(address, "hvd.init()")
        measures = environment.stragglers
        return ControlClient(own_end, group, generation, coordinator, welcome, measures_steps=measures), early
    except BaseException:
        own_end.close()
        coordinator.close()
        raise


def _listen(group: Group, nodes: Sequence[str]) -> socket.socket:
    backlog = max(128, group.size)
    is_one_host = len(set(nodes)) == 1
    job_dir = os.environ.get(JOB_DIR, "")
    if is_one_host and os.path.isdir(job_dir):
        # Unix socket paths are limited: this name is no longer than the store's socket's, which is known to fit.
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(job_dir, secrets.token_hex(3)[:5]))
        listener.listen(backlog)
        return listener
    try:
        address = LOOPBACK if is_one_host else address_for_others(group.hosts)
    except OSError as error:
        raise CommunicationError(
            f"hvd.init() failed on rank 0: no address of this host was found that other hosts can reach ({error}): "
            "set GLOO_SOCKET_IFNAME to the network interface that leads to them"
        ) from error
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def _reach(
    address: Any, group: Group, timeout: timedelta
) -> tuple[Mailbox[ToRank0, FromRank0], Welcome, list[FromRank0]]:
    """Connects to rank 0 and authenticates; returns the mailbox, the welcome, and messages received after it."""
    own, timeout_s = group.describe_rank(group.rank), timeout.total_seconds()
    give_up_at_s = time.monotonic() + timeout_s
    while True:
        try:
            connection = _connect(address, timeout_s)
        except OSError as error:
            firewall = no_connection_between(group.hosts, group.hosts[group.rank], error)
            raise CommunicationError(
                f"hvd.init() failed on {own}: rank 0 cannot be reached at {address} ({error})"
                f"{f'. {firewall}. If they use another network' if firewall else ''}: set "
                "GLOO_SOCKET_IFNAME to the network interface that leads to the other hosts"
            ) from error
        try:
            return _introduce(connection, group, give_up_at_s)
        except ValueError as error:
            connection.close()
            raise CommunicationError(
                f"hvd.init() failed on {own}: the program that answers at {address} {error}"
            ) from error
        except (OSError, EOFError) as error:
            # Rank 0 closed the connection because the handshake took too long or too many others connected: try again.
            connection.close()
            if time.monotonic() + _AGAIN_S >= give_up_at_s:
                raise CommunicationError(
                    f"hvd.init() failed on {own}: rank 0 at {address} did not accept its connection within "
                    f"{timeout_s:g} s ({error or 'it closed the connection'}): see rank 0's log for the reason"
                ) from error
            time.sleep(_AGAIN_S)


def _connect(address: Any, timeout_s: float) -> socket.socket:
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_s)
            connection.connect(address)
        except OSError:
            connection.close()
            raise
        return connection
    connection = socket.create_connection(address[:2], timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _introduce(
    connection: socket.socket, group: Group, give_up_at_s: float
) -> tuple[Mailbox[ToRank0, FromRank0], Welcome, list[FromRank0]]:
    """Authenticates on a new connection, and waits for rank 0's welcome.

    Raises a ValueError if the other end does not prove that it is rank 0, and an OSError or EOFError if it closes.
    """
    caller = HandshakeClient(group.signer, group.rank)
    connection.settimeout(max(_AGAIN_S, give_up_at_s - time.monotonic()))
    connection.sendall(caller.hello)
    challenge = b""
    while len(challenge) < CHALLENGE_BYTES:
        part = connection.recv(CHALLENGE_BYTES - len(challenge))
        if not part:
            raise EOFError("it closed the connection")
        challenge += part
    proved = caller.prove(challenge)
    if proved is None:
        raise ValueError("does not know the job's key, so it is not rank 0 of this job: start the job again")
    proof, session = proved
    connection.sendall(proof)
    mailbox = Mailbox(connection, session, sends=UP, receives=DOWN)
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            left_s = give_up_at_s - time.monotonic()
            if not selector.select(max(0.0, left_s)) and left_s <= 0:
                raise TimeoutError("it sends no data")
            match mailbox.receive():
                case [Welcome() as welcome, *early]:
                    return mailbox, welcome, early
                case [_, *_]:
                    raise ValueError("does not use hvdlite's protocol, so it is not rank 0 of this job")
