"""Decides, in one loop over events, when the job ends, who was the cause, and what the launcher's exit code is.

    events ──► Supervisor.run ──► signals to workers, text to the screen, an Outcome

A job ends by itself when every worker has. It is ended when a worker fails, the launcher is signalled, or
its output cannot be written: the others get a signal, then a grace to end, then SIGKILL. The grace is long where
the signal came from outside, since workers may have a checkpoint to write. The first cause
stands; what happens to ranks after they were signalled is never one. No thread, process or clock of its
own: tests replay scripts.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol

from ..plan.slots import Slot
from ..system.signals import shell_code, signal_name
from ..wire.messages import (
    AgentSaid,
    Answered,
    Event,
    Exited,
    GaveUp,
    InputRead,
    InputWanted,
    Interrupted,
    Joined,
    Joining,
    Lost,
    Output,
    Refused,
    ScreenDone,
    ScreenFailed,
    Started,
)
from .failure_message import Failure, Outcome, Tail, failure_message, name_ranks
from .init_calls import InitCalls

# A worker that says it only lost a peer is the cause only if no other fails for this long: the peer whose
# sockets closed may need it to be gone. With `FAILURE_GRACE_S` it stays below the 5 s that a failed job may last.
PEER_LOST_S = 1.5
# A worker that failed and wrote nothing to stderr may leave it to another, that fails alike, to say why: for so long
# the others are left alone.
SAME_TIME_S = 0.5
# From the first signal to SIGKILL where a worker failed, or a host or the screen was lost.
FAILURE_GRACE_S = 3.0
# Signals to the launcher within this time of the first are one: timeout(1) signals its child and then the child's
# group, systemd sends SIGTERM and SIGHUP.
SAME_SIGNAL_S = 0.2
# Given after SIGKILL for the ends to be reported; hanging up on the agents then ends what still runs.
GIVE_UP_S = 1.0


class Screen(Protocol):
    """Where text goes; `screen.Screen`."""

    def show(self, output: Output) -> None: ...
    def finish(self, worker: int) -> None: ...
    def say(self, text: str) -> None: ...


class Input(Protocol):
    """Where input comes from; `launcher_stdin.Stdin`. Each read is answered by an `InputRead`."""

    def read(self) -> None: ...


class Supervisor:
    def __init__(
        self,
        workers: Mapping[int, Slot],
        *,
        signal_workers: Callable[[Collection[int], int], None],
        send_input: Callable[[int, bytes], None],
        stdin: Input,
        screen: Screen,
        log: Callable[[str], None],
        grace: float,
        start_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``workers`` are all of the job's, by their numbers; what is said of one names the rank it has then.

        ``grace``: seconds from a signal to the launcher to SIGKILL; after a failure it is `FAILURE_GRACE_S` at most.

        ``log`` takes what only the curious want.

        ``start_timeout_s``: how long after the first hvd.init() all ranks must be connected.
        """
        self._workers = workers
        self._signal_workers = signal_workers
        self._send_input = send_input
        self._stdin = stdin
        self._input_for = 0  # the worker that has room for more
        self._screen = screen
        self._log = log
        self._grace = grace
        self._clock = clock
        self._running = set(workers)
        self._pids: dict[int, int] = {}
        self._written = {number: {"stderr": Tail(), "stdout": Tail()} for number in workers}
        self._done: list[int] = []  # those that ended well, in order
        self._init_calls = InitCalls(workers, start_timeout_s, clock)
        self._failed: list[Exited] = []  # the first to fail, which wrote nothing, and those that did so with it
        self._suspect: Exited | None = None
        self._named: Exited | None = None  # a suspect that was blamed, while who left it may still be ending
        self._outcome: Outcome | None = None
        self._effect_of = 0  # the signal whose effect the cause so far may be, if it reaches us too
        self._signalled_at: float | None = None
        self._ending = False
        self._gave_up = False
        self._has_killed = False
        self._alarm: tuple[float, Callable[[], None]] | None = None

    def run(self, events: SimpleQueue[Event]) -> Outcome:
        """Decide until nothing runs any more."""
        while self._running and not self._gave_up:
            time_left = self._time_left()
            # Looked at first: in a flood of output the queue may never be empty.
            if time_left is not None and time_left <= 0:
                self._ring()
                continue
            with contextlib.suppress(Empty):
                self._on(events.get(timeout=time_left))
        self._settle()
        outcome = self._outcome or Outcome()
        return replace(outcome, hasty=outcome.hasty or self._gave_up)

    def _on(self, event: Event) -> None:  # noqa: PLR0912  # one place that says what each event leads to
        match event:
            case Output():
                self._written[event.worker][event.stream].add(event.data)
                self._screen.show(event)
            case Started():
                self._pids[event.worker] = event.pid
                self._log(f"{self._ranks([event.worker])} is pid {event.pid} on {self._host(event.worker)}")
            case Joining():
                self._init_calls.note(event)
                self._look_for_absent()
            case Joined():
                self._init_calls.note(event)
                self._log(f"{self._ranks([event.worker])} is connected")
            case GaveUp():
                self._init_calls.note(event)
                self._log(f"{self._ranks([event.worker])} has given up hvd.init()")
            case InputWanted():
                self._input_for = event.worker
                self._stdin.read()
            case InputRead():
                self._send_input(self._input_for, event.data)
            case Exited():
                self._screen.finish(event.worker)
                self._running.discard(event.worker)
                self._log(f"{self._ranks([event.worker])} ended with exit code {shell_code(event.returncode)}")
                self._judge(event)
            case Refused():
                where = "" if event.host is None else f"{event.host}: "
                self._decide(Outcome(event.exit_code, where + event.why))
                self._running.clear()  # what started will not be told how it ends; hanging up ends it
            case AgentSaid():
                self._screen.say(f"{event.host}: {event.text.rstrip()}")
            case Lost():
                self._running = {number for number in self._running if self._host(number) != event.host}
                self._decide(Outcome(1, f"lost {event.host}: {event.why}. Its workers were killed"))
                self._end()
            case Interrupted():
                self._interrupt(event.signum)
            case ScreenFailed():
                if self._outcome is None and not self._failed:
                    self._effect_of = signal.SIGHUP  # of a terminal that is closed, writing may tell first
                self._decide(Outcome.without_screen(event))
                self._end()
            case ScreenDone() | Answered():
                raise AssertionError(f"out of turn: {event}")

    # ------------------------------------------------------------- judgements

    def _judge(self, end: Exited) -> None:
        if end.returncode == 0:
            self._done.append(end.worker)
        if self._outcome is not None:
            if self._named is not None and end.left:
                self._blame_who_left(self._named, end)
            return
        if end.returncode == 0:
            self._look_for_absent()
            return
        if end.peer_lost:
            if self._suspect is None and not self._failed:
                self._suspect = end
                self._set_alarm(PEER_LOST_S, self._settle)
            return
        self._failed.append(end)
        first = self._failed[0]
        if end is first:
            self._effect_of = shell_code(end.returncode) - 128
        wrote = bool(self._written[end.worker]["stderr"].lines())
        if (wrote and end.returncode == first.returncode) or first.returncode < 0:
            self._settle()
        elif end is first:
            time_left = SAME_TIME_S if self._suspect is None else min(SAME_TIME_S, self._time_left() or 0.0)
            self._set_alarm(time_left, self._settle)

    def _look_for_absent(self) -> None:
        why = self._init_calls.missed(self._running, self._done)
        if why is not None and self._outcome is None:
            self._decide(Outcome(1, why))
            self._end()

    def _settle(self) -> None:
        """Name who failed first; if no rank did by itself, the one that lost a peer is all we can name so far."""
        if self._outcome is not None:
            return
        if self._failed:
            self._blame(*self._failed)
        elif self._suspect is not None:
            self._named = self._suspect
            self._blame(self._suspect)
        else:
            return
        self._end()

    def _blame_who_left(self, named: Exited, end: Exited) -> None:
        """It takes longer to end than others take to notice, and does not mind SIGTERM meanwhile."""
        self._named, self._outcome = None, None
        was_killed_here = self._has_killed and end.returncode == -signal.SIGKILL
        self._blame(named if end.returncode == 0 or was_killed_here else end)

    def _blame(self, first: Exited, *others: Exited) -> None:
        words = failure_message(self._failure(first), [self._failure(other) for other in others])
        if first.peer_lost and self._done:
            words = f"{self._ranks(self._done)} had ended with exit code 0 before the others were done; then {words}"
        self._outcome = Outcome(shell_code(first.returncode), words, rank=self._workers[first.worker].rank)

    def _failure(self, end: Exited) -> Failure:
        lines = {stream: tail.lines() for stream, tail in self._written[end.worker].items()}
        return Failure(
            self._workers[end.worker].rank,
            self._host(end.worker),
            self._pids.get(end.worker, 0),
            end.returncode,
            **lines,
        )

    def _host(self, number: int) -> str:
        return self._workers[number].host.label

    def _ranks(self, numbers: Collection[int]) -> str:
        return name_ranks([self._workers[number].rank for number in numbers])

    def _running_ranks(self) -> list[int]:
        return sorted(self._workers[number].rank for number in self._running)

    def _interrupt(self, signum: int) -> None:
        """The first signal to the launcher is passed on; another one, or one while the job ends anyway, kills at once.

        A scheduler may signal the workers too, or a terminal be closed: then what we saw of that first is no cause.
        """
        if self._signalled_at is not None and self._clock() - self._signalled_at < SAME_SIGNAL_S:
            return
        is_effect = self._signalled_at is None and self._effect_of == signum and not self._has_killed
        self._signalled_at = self._clock()
        name, workers = signal_name(signum), f"{len(self._running)} worker{'s' if len(self._running) > 1 else ''}"
        if self._outcome is not None and not is_effect:
            self._outcome = replace(self._outcome, hasty=True)
            if not self._has_killed:
                self._screen.say(f"{name}: {workers} killed at once")
                self._kill()
            return
        self._outcome = Outcome(128 + signum, hasty=True)
        if self._grace == 0:
            self._screen.say(f"{name}: {workers} killed at once (--grace 0)")
            self._kill()
            return
        again = "Ctrl-C again" if signum == signal.SIGINT else "a second signal"
        self._screen.say(
            f"{name} passed on to {workers}: what still runs in {self._grace:g} s is "
            f"killed ({again}: at once; --grace sets the time)"
        )
        self._end(signum, self._grace)

    def _decide(self, outcome: Outcome) -> None:
        """The first cause stands."""
        if self._outcome is None and self._failed:
            self._blame(*self._failed)
        self._outcome = self._outcome or outcome

    # ----------------------------------------------------------------- ending

    def _end(self, signum: int = signal.SIGTERM, grace: float | None = None) -> None:
        """Signal what runs; SIGKILL follows after the grace, `FAILURE_GRACE_S` at most if none is given.

        Workers are signalled once: a second call changes nothing but the grace, if it gives one.
        """
        if not self._running or (self._ending and grace is None):
            return
        grace = min(self._grace, FAILURE_GRACE_S) if grace is None else grace
        if grace == 0:
            self._kill()
            return
        if not self._ending:
            self._ending = True
            self._log(f"{signal_name(signum)} to ranks {self._running_ranks()}, SIGKILL in {grace:g} s")
            self._signal_workers(sorted(self._running), signum)
        self._set_alarm(grace, self._end_grace)

    def _end_grace(self) -> None:
        # Who was given time to write a checkpoint is told that it did not suffice.
        if self._signalled_at is not None:
            self._screen.say(f"{self._ranks(self._running)} still ran after {self._grace:g} s: killed (--grace)")
        self._kill()

    def _kill(self) -> None:
        self._ending = self._has_killed = True
        self._log(f"SIGKILL to ranks {self._running_ranks()}")
        self._signal_workers(sorted(self._running), signal.SIGKILL)
        self._set_alarm(GIVE_UP_S, self._give_up)

    def _give_up(self) -> None:
        self._gave_up = True

    # ------------------------------------------------------------------ alarm

    def _set_alarm(self, delay_s: float, action: Callable[[], None]) -> None:
        """At most one is set: each step of an end follows from the one before."""
        self._alarm = self._clock() + delay_s, action

    def _time_left(self) -> float | None:
        """Until the alarm or, while nothing is being ended or judged, until ranks are late."""
        return self._init_calls.time_left_s() if self._alarm is None else self._alarm[0] - self._clock()

    def _ring(self) -> None:
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm[1]()
        else:
            self._decide(Outcome(1, self._init_calls.late()))
            self._end()
