"""
The messages between launcher and agents, and the other events of the launcher's event loop, as dataclasses.

    launcher ── Greet, StartJob, StartWorkers, SignalWorkers, AskStatus, Input, OutputTaken, Beat ──► agent
    launcher ◄── Hello, Started, InputWanted, Output, InitStarted, InitDone, InitFailed, Alive, Stalled, StatusTold,
                                                                                 Exited, Refused, Beat ── agent

To end a job the launcher sends `SignalWorkers`, and at last closes the agent's stdin: the agent then kills what is
left. The messages about the rendezvous store are in `store_messages`. The types of the fields say what is allowed in
what was received. A `LauncherEvent` is made in the launcher and never sent.

``worker`` is a worker's number, which identifies it during the whole job. Its rank is in its `Slot` (see `slots`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from hvdlite_wire.codec import Address, Between, Bytes, Count, Pid, Seconds, Text, WorkerNumber
from hvdlite_wire.store_requests import NewWorkerPolicy
from hvdlite_wire.worker_status import WorkerStatus

from .store_messages import StoreCommand, StoreEvent


def _not_empty(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words:
        raise ValueError("it has no word")
    return words


def _names_without_equals(variables: Mapping[str, str]) -> Mapping[str, str]:
    if any("=" in name for name in variables):
        raise ValueError("a variable's name has no equals sign")
    return variables


def _part_of_a_path(text: str) -> str:
    if not re.fullmatch(r"[0-9a-z-]+", text):
        raise ValueError("it is no job's token")
    return text


Words = Annotated[tuple[Text, ...], _not_empty]
Variables = Annotated[Mapping[Text, Text], _names_without_equals]
Token = Annotated[str, _part_of_a_path]
Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class Output:
    """Bytes that a worker wrote, split anywhere."""

    worker: int
    stream: Stream
    data: bytes


@dataclass(frozen=True)
class Started:
    worker: WorkerNumber
    pid: Pid


@dataclass(frozen=True)
class InputWanted:
    """A worker's stdin pipe has accepted everything that was sent: the launcher may send one more `Input`."""

    worker: WorkerNumber


@dataclass(frozen=True)
class InitStarted:
    """A worker has entered hvd.init().

    ``after``: in an elastic job, the last generation that it was given a rank in, 0 if none; else None.
    """

    worker: WorkerNumber
    after: Count | None = None
    newcomers: NewWorkerPolicy = NewWorkerPolicy.WELCOME


@dataclass(frozen=True)
class InitDone:
    worker: WorkerNumber
    after: Count | None = None


@dataclass(frozen=True)
class InitFailed:
    """A worker's hvd.init() has raised an exception. The worker no longer waits in it; its program may continue.

    In an elastic job, with ``after`` 0 it takes back that it has asked for a first rank, since it stands by.
    ``is_unconnected``: it could not connect to the other ranks of generation ``after``. Then ``addresses`` are its own
    for connections to other hosts, and ``refused_by`` are those that refused it, if known.
    """

    worker: WorkerNumber
    after: Count | None = None
    is_unconnected: bool = False
    addresses: tuple[Address, ...] = ()
    refused_by: tuple[Address, ...] = ()


@dataclass(frozen=True)
class Alive:
    """A worker's answer to question ``number`` of `elastic.hangs`.

    ``waited_s``: for how long it has waited for other ranks, in what it waits for now; 0 if for nothing. ``addresses``:
    its own on connections to ranks on other hosts. ``silent_s``: for how many seconds nothing has come from other
    addresses, if that is long.
    """

    worker: WorkerNumber
    number: Count
    waited_s: Seconds
    addresses: tuple[Address, ...] = ()
    silent_s: Mapping[Address, Seconds] = field(default_factory=dict)


@dataclass(frozen=True)
class Stalled:
    """A worker has waited for other ranks for longer than its stall warning's time. Sent once in each wait."""

    worker: WorkerNumber
    waited_s: Seconds


@dataclass(frozen=True)
class StatusTold:
    """What a worker does: the answer to the `AskStatus` with this ``number`` and ``in_full``; 0 at the worker's end."""

    worker: WorkerNumber
    number: Count
    in_full: bool
    status: WorkerStatus


@dataclass(frozen=True)
class Exited:
    """A worker has ended. All its `Output` was sent before this.

    ``returncode`` is -n for signal n. By its own report, ``peer_lost``: it ended only because another rank ended;
    ``peer_left``: that one was leaving; ``left``: it was leaving the others itself, before they could notice;
    ``apart``: it has trained a model of its own, and met no other rank. ``peak_memory``: the most bytes that its
    process, or a child it has waited for, had at a time; 0 if that is not known, or follows in `PeakMemory`.
    """

    worker: WorkerNumber
    returncode: Annotated[int, Between(-255, 255)]
    peer_lost: bool = False
    left: bool = False
    peer_left: bool = False
    peak_memory: Bytes = 0
    apart: bool = False


@dataclass(frozen=True)
class PeakMemory:
    """What an earlier `Exited` of this worker did not say yet; ``size`` is in bytes."""

    worker: WorkerNumber
    size: Bytes


@dataclass(frozen=True)
class Refused:
    """The agent could not start the command. ``exit_code`` is the one that a shell would give (127: not found).

    ``worker`` could not be started; None if the host can have none. ``host`` is the label of the agent's host, None for
    the launcher's machine, set by the launcher on receipt.
    """

    why: Text
    exit_code: Annotated[int, Between(1, 255)]
    host: Text | None = None
    worker: WorkerNumber | None = None


@dataclass(frozen=True)
class Hello:
    """An agent's answer to `Greet`.

    ``slots``: by the host's hardware, None unless `Greet` asked to count them. ``address``: the host's IP address for
    the other hosts, None if unknown (the launcher's own machine). ``port``: a TCP port that the agent keeps free, for
    rank 0 to listen on. ``machine`` identifies the machine and container, None if unknown.
    """

    version: Text
    slots: Annotated[int, Between(1, 10**6)] | None
    address: Address | None
    port: Annotated[int, Between(1, 65535)]
    machine: Text | None = None


@dataclass(frozen=True)
class Beat:
    """A heartbeat, sent in both directions. An end that has been silent for too long counts as dead."""


@dataclass(frozen=True)
class Answered:
    """The agent on the host labelled ``host`` has sent `Hello`."""

    host: str
    hello: Hello


@dataclass(frozen=True)
class AgentSaid:
    """Text of one or more lines from the agent's stderr, written by the agent or by ssh."""

    host: str
    text: str


@dataclass(frozen=True)
class Lost:
    """The connection to the agent on ``host`` has ended."""

    host: str
    why: str


@dataclass(frozen=True)
class LoopFailed:
    """The launcher hears no agent any more, as the thread of all connections has failed. ``why`` is the error."""

    why: str

    def __str__(self) -> str:
        return f"the launcher's connections to its agents failed: {self.why}"


@dataclass(frozen=True)
class NotThereYet:
    """A host cannot be connected to, and it is tried again until it is hung up on.

    ``cause`` has a few words, such as "connection refused"; ``why`` has ssh's own, and what to do.
    """

    host: str
    cause: str
    why: str


@dataclass(frozen=True)
class HostsFound:
    """The hosts of an elastic job, by their labels, with their slots: all that are there now, in their order."""

    hosts: Mapping[str, int]


@dataclass(frozen=True)
class DiscoveryFailed:
    """The hosts of an elastic job cannot be found out. ``why`` is for the user."""

    why: str


@dataclass(frozen=True)
class Unresponsive:
    """A worker of an elastic job has not responded for so long, others wait for it, and so it will soon be ended."""

    worker: int
    silent_s: float


@dataclass(frozen=True)
class FaultAsked:
    """A worker asks, through the store, whether it may have the fault ``index`` of its HVDLITE_CHAOS now.

    It is its ``number``-th question, from 0, in its ``step``.
    """

    worker: int
    number: int
    index: int
    step: int


@dataclass(frozen=True)
class Interrupted:
    """The launcher itself has received a signal; ``at_s`` is when (`time.monotonic`), if that matters."""

    signum: int
    at_s: float | None = None


@dataclass(frozen=True)
class UserSignal:
    """The launcher itself has received SIGUSR1 or SIGUSR2, which is for the workers."""

    signum: int


@dataclass(frozen=True)
class ReportAsked:
    """The user asks for a report: by SIGQUIT, which shows it, or by ``hvdlite-run --report``.

    ``answer`` is called with it, as text and as JSON's value; any thread may call it, and it never raises.
    """

    answer: Callable[[str, object], None] | None = None


@dataclass(frozen=True)
class WatchAsked:
    """`hvdlite-run --watch PID` asks for what there is to see, as JSON's value; ``answer`` is as in `ReportAsked`."""

    answer: Callable[[object], None]


@dataclass(frozen=True)
class InputRead:
    """Bytes from the launcher's standard input; empty at its end."""

    data: bytes


@dataclass(frozen=True)
class ScreenFailed:
    """Nothing more can be written to ``where``, one of the launcher's streams or a worker's output file."""

    where: str
    error: OSError


@dataclass(frozen=True)
class ScreenDone:
    """All output has been written."""


# Sent by an agent about one of its workers.
InitEvent = InitStarted | InitDone | InitFailed
OfWorker = Output | Started | InputWanted | InitEvent | Alive | Stalled | StatusTold | Exited | PeakMemory
WorkerEvent = OfWorker | Refused
HostEvent = Answered | NotThereYet | HostsFound | DiscoveryFailed
_Asked = FaultAsked | ReportAsked | WatchAsked
_OfItself = UserSignal | Interrupted | InputRead | ScreenFailed | ScreenDone | LoopFailed
LauncherEvent = HostEvent | Unresponsive | AgentSaid | Lost | _Asked | _OfItself
Event = WorkerEvent | LauncherEvent


@dataclass(frozen=True)
class Greet:
    """The first message to an agent, which answers with `Hello`.

    ``beats``: both ends must send `Beat`, and treat an end that is silent for too long as dead. ``interface``: the
    user's network interface, or several separated by commas: the agent uses the first that its host has.
    """

    version: Text
    beats: bool
    count_slots: bool
    interface: Text | None


@dataclass(frozen=True)
class StartJob:
    """Starts the job's workers of one host.

    All run the same ``command`` in the same ``environment``; ``workers`` has the additional variables of each, by its
    number. ``inherits``: they also get the agent's own variables that are not in ``environment``. ``in_python``:
    ``command`` holds arguments for the agent's own Python interpreter. ``as_horovod``: ``import horovod`` finds
    hvdlite. ``forks``: workers that are started later may be copies of a process that has imported torch (see
    `forked_workers`). ``slots``: how many workers share the host's cores. ``peers``: the addresses of the job's other
    hosts; none if it will have no others.
    """

    token: Token
    command: Words
    cwd: Text
    environment: Variables
    inherits: bool
    peers: tuple[Address, ...]
    in_python: bool
    as_horovod: bool
    forks: bool
    slots: Annotated[int, Between(1, 10**6)]
    workers: Mapping[WorkerNumber, Variables]


@dataclass(frozen=True)
class StartWorkers:
    """Starts more workers of the job that `StartJob` has started on the host."""

    workers: Mapping[WorkerNumber, Variables]


@dataclass(frozen=True)
class SignalWorkers:
    numbers: tuple[WorkerNumber, ...]
    signum: Annotated[int, Between(1, 64)]


@dataclass(frozen=True)
class AskStatus:
    """Asks for a `StatusTold` about each worker on the agent's host; ``in_full``: also what only a report shows."""

    number: Count
    in_full: bool


@dataclass(frozen=True)
class Input:
    """Bytes for a worker's standard input, sent after `InputWanted`; empty at the end of the input."""

    worker: int
    data: bytes


@dataclass(frozen=True)
class OutputTaken:
    """``count`` more bytes of output have been shown or discarded, so the agent may send that many more."""

    count: Annotated[int, Between(0, 1 << 40)]


Command = Greet | OutputTaken | StartJob | StartWorkers | SignalWorkers | AskStatus | Input | StoreCommand | Beat
Message = WorkerEvent | StoreEvent | Hello | Command
