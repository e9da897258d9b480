"""`RankFacts`: what is known of one rank for a report, read from the JSON that `host.collect` sends.

`untrusted` reads the JSON. `causes` and `report_text` use it.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .untrusted import items, mapping, number, parsed, seconds, text, wait

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])?.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')

# Functions in which a program waits for other ranks, by what their files' paths end with. A program of plain
# torch.distributed says nothing else of its waits.
_WAITS = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "hvdlite/comm/work.py")
# The same, for files that also have functions of other kinds: only the innermost frame counts. In the second of them
# DDP compares and sends parameters.
_WAITS_INNERMOST = (
    "torch/distributed/rendezvous.py",
    "torch/distributed/utils.py",
    "torch/distributed/_functional_collectives.py",
)
_BACKWARD = "torch/autograd/graph.py"


# There may be more such directories than a rank knows to be libraries, as by PYTHONPATH.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(.*?)(?:/|\.py|$)")


def _is_of_a_package(frame: Frame) -> bool:
    found = _INSTALLED.search(frame.file)
    return found is not None and found[1] not in ("torch", "hvdlite")


class Source(enum.Enum):
    """How the stacks of a rank are known."""

    ANSWER = "its own answer"
    SIGNAL = "a signal, since it does not answer, or not before hvd.init()"
    NONE = "not known"


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Thread:
    """``frames``: the outermost first."""

    name: str
    is_main: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Wait:
    what: str
    waited_s: float


@dataclass(frozen=True)
class Optimizer:
    """How far an optimizer is in its step: see `hvdlite.calls.reducer_registry.StepProgress`."""

    optimizer: str
    step: int
    phase: str
    buckets: int
    sent: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    state: str
    cpu_s: float
    memory: int
    command: str


@dataclass(frozen=True)
class RankFacts:
    """One rank. ``rank`` is None before it has one. ``processes``: its own, with the descendants. ``addresses`` are its
    own on connections to ranks on other hosts, and ``silent_s`` says for how many seconds nothing has come from
    other addresses. ``can_answer``: its program has called hvd.init(). ``is_ending``: its part in the job is over, and
    it does not answer any more. ``has_come`` is False if its agent sent nothing in time.
    """

    worker: int
    rank: int | None
    host: str
    pid: int
    processes: tuple[Process, ...] = ()
    threads: tuple[Thread, ...] = ()
    waits: tuple[Wait, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    libraries: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    silent_s: Mapping[str, float] = field(default_factory=dict)
    source: Source = Source.NONE
    can_answer: bool = False
    is_ending: bool = False
    has_come: bool = True
    load: float | None = None
    cores: int | None = None

    @property
    def name(self) -> str:
        return f"worker {self.worker}" if self.rank is None else f"rank {self.rank}"

    @property
    def state(self) -> str:
        """The state of the process, as psutil names it; "" if it is not known."""
        return next((each.state for each in self.processes if each.pid == self.pid), "")

    @property
    def main(self) -> tuple[Frame, ...]:
        """The frames of the main thread, the outermost first."""
        return next((each.frames for each in self.threads if each.is_main), ())

    def place(self) -> Frame | None:
        """Returns the innermost frame of the user's own program in the main thread; None if there is none.

        Of an installed program, it is the innermost frame of any installed package but hvdlite and torch.
        """
        for is_program in (self.is_users, _is_of_a_package):
            for frame in reversed(self.main):
                if is_program(frame):
                    return frame
        return None

    def is_users(self, frame: Frame) -> bool:
        return not frame.file.startswith((*self.libraries, "<frozen")) and not _INSTALLED.search(frame.file)

    def is_waiting(self) -> bool:
        """Whether the program waits for other ranks.

        DDP waits at the end of a backward pass, where its stack is that of a rank that computes. So a backward pass in
        which the process sleeps is taken for a wait, unless gradients are averaged by hvdlite, which tells its waits.
        """
        if self.waits:
            return True
        inner, innermost = self.main[-6:], self.main[-1:]
        if any(frame.file.endswith(_WAITS) for frame in inner):
            return True
        if any(frame.file.endswith(_BACKWARD) for frame in innermost):
            return self.state == "sleeping" and not self.optimizers
        return any(frame.file.endswith(_WAITS_INNERMOST) for frame in innermost)

    @property
    def is_mute(self) -> bool:
        """Whether it did not answer, though its program has called hvd.init()."""
        return self.can_answer and self.source is not Source.ANSWER and not self.is_ending

    def can_run(self) -> bool:
        """Whether the process can run its program: its host answers, and it is not stopped, ended, or mute."""
        return self.has_come and self.state not in ("stopped", "tracing-stop", "zombie") and not self.is_mute

    def data(self) -> dict[str, Any]:
        """Returns it for JSON."""
        place = self.place()
        return {
            **asdict(self),
            "source": self.source.name.lower(),
            "state": self.state,
            "place": None if place is None else asdict(place),
            "is_waiting": self.is_waiting(),
        }


def read_facts(told: str, *, worker: int, rank: int | None, host: str, pid: int) -> RankFacts:
    """Returns what the JSON of an agent says of this worker."""
    facts = parsed(told)
    answer = facts.get("answer")
    stacks = facts.get("stacks")
    threads: tuple[Thread, ...] = ()
    libraries: Any = ()
    source = Source.NONE
    if isinstance(answer, dict):
        source, libraries = Source.ANSWER, answer.get("libraries")
        threads = tuple(filter(None, map(_thread, items(answer.get("threads")))))
    else:
        answer = {}
        if isinstance(stacks, str):
            source = Source.SIGNAL
            libraries, threads = _of_signal(stacks)
    load, cores = facts.get("load"), facts.get("cores")
    return RankFacts(
        worker=worker,
        rank=rank,
        host=host,
        pid=number(facts.get("pid"), pid),
        processes=tuple(filter(None, map(_process, items(facts.get("processes"))))),
        threads=threads,
        waits=tuple(Wait(*found) for each in items(answer.get("waits")) if (found := wait(each)) is not None),
        optimizers=tuple(filter(None, map(_optimizer, items(answer.get("optimizers"))))),
        libraries=tuple(each for each in items(libraries) if isinstance(each, str) and each),
        addresses=tuple(text(each) for each in items(answer.get("addresses"))),
        silent_s=_seconds_by_name(answer.get("silent_s")),
        source=source,
        can_answer=facts.get("can_answer") is True,
        is_ending=facts.get("is_ending") is True,
        load=float(load) if isinstance(load, int | float) else None,
        cores=cores if isinstance(cores, int) else None,
    )


def _thread(given: Any) -> Thread | None:
    if not isinstance(given, dict):
        return None
    frames = [each for each in items(given.get("frames")) if isinstance(each, list) and len(each) == 3]
    return Thread(
        text(given.get("name")),
        given.get("is_main") is True,
        tuple(Frame(text(file), number(line), text(function)) for file, line, function in frames),
    )


def _seconds_by_name(given: Any) -> dict[str, float]:
    return {text(key): seconds(value) for key, value in mapping(given).items() if isinstance(value, int | float)}


def _optimizer(given: Any) -> Optimizer | None:
    if not isinstance(given, dict):
        return None
    names = tuple(text(each) for each in items(given.get("missing")))
    step, buckets, sent = (number(given.get(key)) for key in ("step", "buckets", "sent"))
    return Optimizer(text(given.get("optimizer")), step, text(given.get("phase")), buckets, sent, names)


def _process(given: Any) -> Process | None:
    if not isinstance(given, dict):
        return None
    cpu_s = given.get("cpu_s")
    return Process(
        number(given.get("pid")),
        text(given.get("name")),
        text(given.get("state")),
        float(cpu_s) if isinstance(cpu_s, int | float) else 0.0,
        number(given.get("memory")),
        text(given.get("command")),
    )


def _of_signal(written: str) -> tuple[Any, tuple[Thread, ...]]:
    """Returns the libraries and the threads in what faulthandler has written, with a first line of JSON."""
    first, _, rest = written.partition("\n")
    try:
        libraries = json.loads(first).get("libraries")
    except (ValueError, AttributeError):
        libraries = ()
    stacks: list[tuple[str, list[Frame]]] = []
    for line in rest.split("\n"):
        if head := _THREAD.match(line):
            stacks.append((text(head[2]) or f"thread {head[1]}", []))
        elif stacks and (found := _FRAME.match(line)):
            line_number = int(found[2]) if found[2].isdigit() else 0
            stacks[-1][1].append(Frame(text(found[1]), line_number, text(found[3])))
    # The newest thread is written first, so the main thread is the last one.
    threads = [
        Thread(name, index == len(stacks) - 1, tuple(reversed(frames))) for index, (name, frames) in enumerate(stacks)
    ]
    return libraries, tuple(threads)


def sorted_by_rank(facts: Iterable[RankFacts]) -> list[RankFacts]:
    """Returns them by rank; those without one at the end, by number."""
    return sorted(facts, key=lambda each: (each.rank is None, each.rank, each.worker))
