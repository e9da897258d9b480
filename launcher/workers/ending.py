"""The workers of a job, what is known of each, and how they are ended: signals, the grace period, SIGKILL.

    a judgement, or a signal to the launcher ──► Ending ──► signals to workers, a JobOutcome

`supervisor` keeps the `Roster` up to date, and calls `Ending` when its alarm is due. Workers that are to end get a
signal, and SIGKILL after a grace period. It is longer if the launcher was signalled, since workers may have to write a
checkpoint. The first cause determines the outcome; what workers do after they were signalled does not.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..protocol.messages import Event, Exited, Output, Stream
from ..system.process_tree import signal_name
from .failure_message import Failure, JobOutcome, Tail, name_ranks, name_workers

# From the first signal to SIGKILL after a failure of a worker, a host or the screen.
FAILURE_GRACE_S = 3.0
# Signals to the launcher within this time of the first count as one: timeout(1) signals its child and then the child's
# process group, systemd sends SIGTERM and SIGHUP.
SAME_SIGNAL_S = 0.2
# How long to wait after SIGKILL for the workers' `Exited`. Then hanging up on the agents ends what still runs.
GIVE_UP_S = 1.0


class Observer:
    """What `supervisor` tells of each event of a job, before it handles the event itself, and of time."""

    def on_event(self, event: Event) -> None:
        """Takes note of an event."""

    def time_left_s(self) -> float | None:
        """Returns the seconds until `time_passes` must be called; None if it need not be."""
        return None

    def time_passes(self) -> None:
        """Does what is due."""


@dataclass
class WorkerRecord:
    """What is known of a worker. ``rank`` is its rank now; None before it has one, in an elastic job."""

    host: str
    rank: int | None
    pid: int = 0
    written: Mapping[Stream, Tail] = field(default_factory=lambda: {"stderr": Tail(), "stdout": Tail()})


class Roster(dict[int, WorkerRecord]):
    def add(self, number: int, host: str, rank: int | None = None) -> None:
        self[number] = WorkerRecord(host, rank)

    def note(self, output: Output) -> None:
        """Keeps what a worker wrote, as its last lines may be the reason for its failure."""
        self[output.worker].written[output.stream].add(output.data)

    def on_host(self, host: str) -> list[int]:
        return [number for number, record in self.items() if record.host == host]

    def hosts_of(self, numbers: Iterable[int]) -> list[str]:
        """Returns the hosts of these workers, each once. Any thread may ask, also of workers that have just ended."""
        return list(dict.fromkeys(record.host for number in numbers if (record := self.get(number)) is not None))

    def name(self, numbers: Collection[int]) -> str:
        """Returns the ranks of these workers, as in ``ranks 0, 2``; those without a rank by number."""
        ranks = [rank for number in numbers if (rank := self[number].rank) is not None]
        others = [number for number in numbers if self[number].rank is None]
        return " and ".join([*([name_ranks(ranks)] if ranks else []), *([name_workers(others)] if others else [])])

    def failure(self, end: Exited) -> Failure:
        record = self[end.worker]
        lines = {stream: tail.lines() for stream, tail in record.written.items()}
        return Failure(record.rank, record.host, record.pid, end.returncode, worker=end.worker, **lines)


@dataclass(eq=False)
class Ending:
    """The workers that run, the outcome once it is decided, and the steps of the job's end.

    ``grace``: seconds from a signal to the launcher to SIGKILL. After a failure it is `FAILURE_GRACE_S` at most.
    ``say`` shows a message; ``log`` shows one with ``--verbose`` only.
    """

    roster: Roster
    signal_workers: Callable[[Collection[int], int], None]
    say: Callable[[str], None]
    log: Callable[[str], None]
    grace: float
    clock: Callable[[], float]
    running: set[int] = field(default_factory=set)
    """The numbers of the workers that run."""
    outcome: JobOutcome | None = None
    effect_of: int = 0
    """If the launcher receives this signal now, that is the cause, and what set the outcome is its effect."""
    has_killed: bool = False
    gave_up: bool = False
    """Whether workers did not end after SIGKILL."""
    _signalled_at: float | None = None
    _is_ending: bool = False
    _alarm: tuple[float, Callable[[], None]] | None = None

    def decide(self, outcome: JobOutcome) -> None:
        """Sets the outcome, unless there is an earlier cause."""
        self.outcome = self.outcome or outcome

    def pass_on(self, signum: int) -> None:
        """Passes a signal that is for the program on to those processes of the workers that handle it."""
        if self.outcome is not None:
            return
        if not self.running:
            self.say(f"{signal_name(signum)}: no worker runs that it could be passed on to")
        else:
            self.say(f"{signal_name(signum)} passed on to {self._count()}, to the processes that handle it")
            self.signal_workers(self.running, signum)

    def _count(self) -> str:
        return f"{len(self.running)} worker{'s' if len(self.running) > 1 else ''}"

    def interrupt(self, signum: int, at_s: float | None = None) -> None:
        """Passes the launcher's first signal on to the workers. A later one, or one while the job ends, kills them.

        ``at_s`` is when it was received, by the clock, which may be long ago on a busy machine; the default is now.
        A scheduler may signal the workers too, and writes to a closed terminal fail. If such an effect of the signal
        arrived first, the signal is still the cause.
        """
        at_s = self.clock() if at_s is None else at_s
        if self._signalled_at is not None and at_s - self._signalled_at < SAME_SIGNAL_S:
            return
        is_effect = self._signalled_at is None and self.effect_of == signum and not self.has_killed
        self._signalled_at = at_s
        name, workers = signal_name(signum), self._count()
        if self.outcome is not None and not is_effect:
            self.outcome = replace(self.outcome, hasty=True)
            if not self.has_killed:
                self.say(f"{name}: {workers} killed at once")
                self._kill()
            return
        self.outcome = JobOutcome(128 + signum, hasty=True)
        if not self.running:
            return
        if self.grace == 0:
            self.say(f"{name}: {workers} killed at once (--grace 0)")
            self._kill()
            return
        again = "Ctrl-C again" if signum == signal.SIGINT else "a second signal"
        self.say(
            f"{name} passed on to {workers}: what still runs in {self.grace:g} s is "
            f"killed ({again}: at once; --grace sets the time)"
        )
        self.end(signum, self.grace)

    def end(self, signum: int = signal.SIGTERM, grace: float | None = None) -> None:
        """Signals the running workers. SIGKILL follows after ``grace``, by default `FAILURE_GRACE_S` at most.

        Workers are signalled once: a second call only changes the grace, if it is given one.
        """
        if not self.running or (self._is_ending and grace is None):
            return
        grace = min(self.grace, FAILURE_GRACE_S) if grace is None else grace
        if grace == 0:
            self._kill()
            return
        if not self._is_ending:
            self._is_ending = True
            self.log(f"{signal_name(signum)} to {self.roster.name(self.running)}, SIGKILL in {grace:g} s")
            self.signal_workers(sorted(self.running), signum)
        self._set_alarm(grace, self._end_grace)

    def _end_grace(self) -> None:
        # The user gave workers this time for a checkpoint, and should know that it was too short.
        if self._signalled_at is not None:
            self.say(f"{self.roster.name(self.running)} still ran after {self.grace:g} s: killed (--grace)")
        self._kill()

    def _kill(self) -> None:
        self._is_ending = self.has_killed = True
        self.log(f"SIGKILL to {self.roster.name(self.running)}")
        self.signal_workers(sorted(self.running), signal.SIGKILL)
        self._set_alarm(GIVE_UP_S, self._give_up)

    def _give_up(self) -> None:
        self.gave_up = True

    def _set_alarm(self, delay_s: float, action: Callable[[], None]) -> None:
        """Sets the only alarm, replacing another: each step of the job's end follows from the one before."""
        self._alarm = self.clock() + delay_s, action

    def time_left_s(self) -> float | None:
        """Returns the seconds until `ring` is due; None if the job is not ending."""
        return None if self._alarm is None else self._alarm[0] - self.clock()

    def ring(self) -> None:
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm[1]()
