"""The messages between launcher and agent, and the other events of the launcher's loop. Dataclasses alone.

    launcher ── Greet, StartJob, SignalWorkers, Input, OutputTaken, Beat ──► agent   (at its stdin's end: kill all)
    launcher ◄── Hello, Started, InputWanted, Output, Joining, Joined, GaveUp, Exited, Refused, Beat ── agent

What they say to each other about the store is in `store_messages`.
`Answered`, `Lost`, `AgentSaid`, `Interrupted`, `InputRead` and the screen's events arise in the launcher and never
travel. How the others lie on the wire is in `agent_frames`.

``worker`` is a worker's number: who it is for the whole job. Its rank is a property that is looked up (see `slots`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .store_messages import StoreCommand, StoreEvent

Stream = Literal["stdout", "stderr"]


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Output:
    """Bytes that a worker wrote, cut anywhere."""

    worker: int
    stream: Stream
    data: bytes


@dataclass(frozen=True)
class Started:
    worker: int
    pid: int


@dataclass(frozen=True)
class InputWanted:
    """A worker's standard input has taken all that was sent, and has room for one more `Input`."""

    worker: int


@dataclass(frozen=True)
class Joining:
    """A worker has begun hvd.init()."""

    worker: int


@dataclass(frozen=True)
class Joined:
    """It has completed it."""

    worker: int


@dataclass(frozen=True)
class GaveUp:
    """It has left it with an exception: it does not wait any more, and its program may go on."""

    worker: int


@dataclass(frozen=True)
class Exited:
    """A worker has ended, and all it wrote came before this.

    ``returncode`` is -n for signal n. ``peer_lost``: it said itself that it ends only because another did;
    ``left``: that it was leaving the others, before they could notice.
    """

    worker: int
    returncode: int
    peer_lost: bool = False
    left: bool = False


@dataclass(frozen=True)
class Refused:
    """The agent could not start the command; ``exit_code`` is what a shell would give (127: not found).

    ``host`` is the label of the agent's, if that is not this machine: set where this arrives.
    """

    why: str
    exit_code: int
    host: str | None = None


@dataclass(frozen=True)
class Hello:
    """An agent's answer to `Greet`: what it is, and where its host can be reached by others.

    ``slots`` are counted if that was asked. ``address`` is the host's own, as seen by whoever reaches it; None on
    the launcher's machine, which does not know. ``port`` is kept free there for a program that makes rank 0 listen.
    ``machine`` is what no other machine or container is called, if that can be told.
    """

    version: str
    slots: int | None
    address: str | None
    port: int
    machine: str | None = None


@dataclass(frozen=True)
class Beat:
    """A heartbeat, sent in both directions; an end that stays silent is taken to be gone."""


@dataclass(frozen=True)
class Answered:
    """The agent on ``host`` (its label) said hello."""

    host: str
    hello: Hello


@dataclass(frozen=True)
class AgentSaid:
    """What came on the agent's stderr, from itself or from ssh: text of one or more lines."""

    host: str
    text: str


@dataclass(frozen=True)
class Lost:
    """The connection to the agent on ``host`` has ended."""

    host: str
    why: str


@dataclass(frozen=True)
class Interrupted:
    """The launcher itself received a signal."""

    signum: int


@dataclass(frozen=True)
class InputRead:
    """What came on the launcher's standard input; nothing, at its end."""

    data: bytes


@dataclass(frozen=True)
class ScreenFailed:
    """Nothing can be written there any more: to a stream of the launcher's, or to a worker's file."""

    where: str
    error: OSError


@dataclass(frozen=True)
class ScreenDone:
    """All output has been written."""


# What workers do, through the agent that says it of them.
OfWorker = Output | Started | InputWanted | Joining | Joined | GaveUp | Exited
WorkerEvent = OfWorker | Refused
Event = WorkerEvent | Answered | AgentSaid | Lost | Interrupted | InputRead | ScreenFailed | ScreenDone


# -------------------------------------------------------------- commands


@dataclass(frozen=True)
class Greet:
    """The first word, to which `Hello` is the answer.

    ``beats``: both ends shall send `Beat` and take long silence for the other's end. ``interface`` is the network
    interface that the user wants here, or several, with commas between: the first of them that is there.
    """

    version: str
    beats: bool
    count_slots: bool
    interface: str | None


@dataclass(frozen=True)
class StartJob:
    """Start this host's workers: one command, in one environment but for each worker's own variables.

    ``in_python``: the command is words for the Python that the agent runs in. ``as_horovod``: Pythons find hvdlite
    where they import horovod.
    ``workers`` are the variables of each, by its number.
    ``inherits``: variables of the agent's own that are not in ``environment`` are theirs too. ``peers`` are
    addresses of the job's other hosts.
    """

    token: str
    command: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    inherits: bool
    peers: tuple[str, ...]
    in_python: bool
    as_horovod: bool
    workers: Mapping[int, Mapping[str, str]]


@dataclass(frozen=True)
class SignalWorkers:
    numbers: tuple[int, ...]
    signum: int


@dataclass(frozen=True)
class Input:
    """For a worker's standard input, once it was wanted; nothing means its end."""

    worker: int
    data: bytes


@dataclass(frozen=True)
class OutputTaken:
    """So many more bytes of output have been shown, or done with: as many may be sent again."""

    count: int


Command = Greet | OutputTaken | StartJob | SignalWorkers | Input | StoreCommand | Beat
Message = WorkerEvent | StoreEvent | Hello | Command
