"""
The controller of one rank among several: an operation runs once all its ranks have submitted it, in rank 0's order.

    submit, join ── Requests, Joins ── Rank0Connection ──► coordinator ──► go: the executor runs it ── the handle
                                                                       └─► no: the handle's error

Rank 0 sends its go messages to all ranks in the same order, so the collectives on one engine pair up. `ControlClient`
makes this package's parts, each of which knows only those made before it, and passes rank 0's messages to them.

    rank 0 listens ── shares its address over the group ── the others connect ── both authenticate ── ControlClient

Under hvdlite-run on one host, rank 0 listens on a Unix socket in the job's private directory. Otherwise it listens on a
port that the system chooses: on loopback if all ranks are on one host, else on the address that gloo uses. It stops
listening when all ranks are connected.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hvdlite_wire.job_contract import JOB_DIR
from hvdlite_wire.linux import LOOPBACK

from .. import forks
from ..calls import messages
from ..calls.call_sites import places_of_threads
from ..calls.generation import Generation
from ..calls.handle import Handle
from ..calls.mailbox import CHALLENGE_BYTES, DOWN, UP, FrameError, HandshakeClient, Mailbox, mailbox_pair
from ..calls.operation import OPTIMIZER, Controller, DirectCall, Operation, SitOut, StandIn
from ..comm.gloo import InitTimeout
from ..comm.group import Group
from ..comm.step_clock import RankPace
from ..coordinator.stall import StallRules
from ..environment import Environment
from ..errors import CommunicationError, HvdliteError, MismatchError, PeerLostError
from ..rendezvous.host_address import address_for_others, no_connection_between
from ..shm.board import HasBoard
from ..signing import Signer
from .callers import Callers
from .executor import Executor
from .joins import Joins
from .rank0_connection import LOOK_S, Rank0Connection
from .reports import PaceReports, WaitReports
from .requests import Requests
from .unchecked import UncheckedController

if TYPE_CHECKING:
    from ..coordinator.coordinator import Coordinator

_ERRORS: dict[str, type[HvdliteError]] = {
    error.__name__: error for error in (MismatchError, CommunicationError, PeerLostError)
}


class ControlClient:
    """Submits operations to rank 0, and runs those that all ranks have submitted on a thread of its own."""

    def __init__(
        self,
        mailbox: Mailbox[messages.ToRank0, messages.FromRank0],
        group: Group,
        generation: Generation,
        coordinator: Coordinator | None,
        welcome: messages.Welcome,
        *,
        measures_steps: bool = True,
    ) -> None:
        """``coordinator``, whose ``welcome`` has been read, is there on rank 0 only. ``group`` has all ranks."""
        self._coordinator = coordinator
        self._measures_steps = measures_steps
        self._reducers = generation.reducers
        # By process set: its group, and a duplicate of it on a separate engine that only operations use.
        self._groups: dict[int, Group] = {}
        self._operation_groups: dict[int, Group] = {}
        self._connection = connection = Rank0Connection(mailbox, group, generation.watch)
        self._executor = executor = Executor(generation.recorder)
        self._callers = callers = Callers(connection)
        self._joins = joins = Joins(self._reducers, self._groups, executor, connection.lock)
        self._requests = requests = Requests(connection, executor, callers, joins, self._operation_groups)
        self._reports = WaitReports(connection, executor, callers, requests, joins, welcome)
        self._paces = PaceReports(connection)

    def start(self, early: Iterable[messages.FromRank0] = ()) -> None:
        self._executor.start()
        self._connection.start(early, self)
        if self._measures_steps:
            self._paces.start()

    def open_group(self, group: Group) -> None:
        operation_group = group.duplicate()
        self._groups[group.set_id], self._operation_groups[group.set_id] = group, operation_group
        if group.set_id == 0 and isinstance(operation_group.engine, HasBoard):
            coordinator, board = self._coordinator, operation_group.engine.board
            self._requests.open_board(board, None if coordinator is None else coordinator.decide_round)
            if coordinator is not None:
                coordinator.open_board(board)

    def close_group(self, group: Group) -> None:
        del self._groups[group.set_id]
        self._operation_groups.pop(group.set_id).close()

    def submit(self, group: Group, operation: Operation) -> Handle:
        if forks.parent is not None:
            raise forks.refusal(operation.describe())
        if operation.kind != OPTIMIZER:
            # A joining rank waits until these optimizers are open, and this operation may wait for that rank.
            self._reducers.open_all()
        return self._requests.submit(group, operation)

    @property
    def calls_directly(self) -> bool:
        return self._requests.can_vote

    def call_directly(self, group: Group, call: DirectCall) -> Any:
        if forks.parent is not None:
            raise forks.refusal(call.describe())
        self._reducers.open_all()
        return self._requests.call_directly(group, call)

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        forks.require_rank("hvd.join()")
        # The other ranks rely on it that a rank that has joined has opened all its optimizers.
        for opening in self._reducers.open_all():
            opening.wait()
        handle = Handle("join")
        living = self._joins.begin(handle, stand_in, sit_out)
        self._requests.say_in_order(messages.HasJoined(average_of_active, living))
        return handle

    def waits(self) -> list[tuple[str, float]]:
        return self._reports.waits()

    def revoke(self, reason: str) -> None:
        self._connection.revoke(reason)
        self._requests.fail_all()

    def stragglers(self) -> tuple[RankPace, ...]:
        return self._paces.paces

    def close(self) -> None:
        self._paces.close()
        self._connection.close()
        # Not for long: it may be in an operation that another rank has abandoned.
        self._executor.wait_for_end(LOOK_S)
        if self._coordinator is not None:
            self._coordinator.close(has_lost_rank=self._connection.has_lost_rank)

    # -- on the listening thread, as its `Listener`

    def heard(self) -> None:
        self._reports.heard()

    def look(self, now_s: float) -> None:
        self._reports.look(now_s)

    def take(self, message: messages.FromRank0) -> None:  # noqa: PLR0912  # a case for each message
        match message:
            case messages.Go(ticket, owns, divisor):
                self._requests.begin(ticket, owns, divisor)
            case messages.No(ticket, error, words):
                self._requests.refuse(ticket, _ERRORS[error](words))
            case messages.StillHere(missing):
                self._requests.note_missing(missing)
            case messages.AskLine():
                self._connection.send(messages.ProgramLine(places_of_threads(self._callers.threads())))
            case messages.Paces(paces):
                self._paces.paces = paces
            case messages.EndProcess(words):
                self._reports.end_process(words)
            case messages.GoAsStandIn():
                self._joins.stand_in(message, self._operation_groups[message.set_id])
            case messages.Pin(join, set_id):
                self._connection.send(messages.Pinned(join, set_id, self._joins.pin(set_id)))
            case messages.Unpin():
                self._joins.unpin()
            case messages.SitOutSteps(set_id, numbers):
                self._joins.sit_out(set_id, numbers)
            case messages.AllJoined(last_rank):
                self._joins.end(lambda handle: handle.succeed(last_rank))
            case messages.JoinFailed(error, words):
                self._joins.end(lambda handle: handle.fail(_ERRORS[error](words)))
            case _:
                raise FrameError(f"{str(message)[:200]} is not a message that rank 0 sends now")

    def ended(self, *, is_closing: bool) -> None:
        self._requests.fail_all()
        if is_closing:
            self._executor.give_up(self._connection.error_of_end)
        else:
            # The other ranks also run what has been agreed on.
            self._executor.finish()


# Pause between two attempts to connect after rank 0 has closed the connection.
_AGAIN_S = 0.2


def make_controller(
    group: Group, generation: Generation, nodes: Sequence[str], environment: Environment, init_timeout: InitTimeout
) -> Controller:
    """Makes this rank's one controller for a generation; every rank must call it, and it waits for rank 0.

    ``nodes``: equal entries are on one host. ``init_timeout`` is also how long the ranks' operations may stall.
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
) -> tuple[ControlClient, list[messages.FromRank0]]:
    # Imported here, since on a host with many ranks the others need not wait for it.
    from ..coordinator.coordinator import Coordinator  # noqa: PLC0415
    from ..coordinator.negotiation import Negotiation  # noqa: PLC0415
    from ..coordinator.stragglers import StragglerWatch  # noqa: PLC0415

    listener = _listen(group, nodes)
    address = listener.getsockname()
    stragglers = StragglerWatch(group.hosts, environment.straggler_warning)
    coordinator = Coordinator(Negotiation(group.hosts, stall), stragglers, listener, group.signer)
    own_end, other_end = mailbox_pair(Signer(secrets.token_bytes(32)))
    coordinator.add(0, other_end)
    coordinator.start()
    try:
        welcome, *early = own_end.receive()
        assert isinstance(welcome, messages.Welcome), "the coordinator sends it first"
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
) -> tuple[Mailbox[messages.ToRank0, messages.FromRank0], messages.Welcome, list[messages.FromRank0]]:
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
    if not isinstance(address, str):
        connection = socket.create_connection(address[:2], timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _introduce(
    connection: socket.socket, group: Group, give_up_at_s: float
) -> tuple[Mailbox[messages.ToRank0, messages.FromRank0], messages.Welcome, list[messages.FromRank0]]:
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
                case [messages.Welcome() as welcome, *early]:
                    return mailbox, welcome, early
                case [_, *_]:
                    raise ValueError("does not use hvdlite's protocol, so it is not rank 0 of this job")
