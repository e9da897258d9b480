"""Runs one job's event loop until no worker is left: dispatches events, and keeps time.

    events ──► Supervisor.run ──► signals to workers, text to the screen, a JobOutcome

`launch` creates and runs it. A job has ended when all its workers have. A `Judgement` decides what the end of a worker
or a lost host means: `first_failure` in a job whose ranks stay the same, `elastic_job` in one that goes on with others.
`ending` ends the workers, also when the launcher is signalled or output cannot be written. None of these has a thread,
process or clock of its own, so tests can replay sequences of events.

`Stdin` reads the launcher's standard input for rank 0, or worker 0 of an elastic job: one piece each time that its pipe
has room. Nothing is read ahead, so input that rank 0 does not read stays unread here too, and its writer blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from queue import Empty, SimpleQueue

from ..elastic.elastic_job import ElasticJob
from ..protocol.messages import (
    AgentSaid,
    Alive,
    Answered,
    DiscoveryFailed,
    Event,
    Exited,
    FaultAsked,
    HostsFound,
    InitDone,
    InitFailed,
    InitStarted,
    InputRead,
    InputWanted,
    Interrupted,
    LoopFailed,
    Lost,
    NotThereYet,
    OfWorker,
    Output,
    PeakMemory,
    Refused,
    ReportAsked,
    ScreenDone,
    ScreenFailed,
    Stalled,
    Started,
    StatusTold,
    Unresponsive,
    UserSignal,
    WatchAsked,
)
from ..screen.job_screen import Screen
from ..status.reports import Reports
from ..system.process_tree import shell_code
from ..workers.ending import Ending, Observer
from ..workers.failure_message import JobOutcome
from ..workers.first_failure import FirstFailure

Judgement = FirstFailure | ElasticJob


@dataclass(eq=False)
class Supervisor:
    """The event loop of one running job."""

    judgement: Judgement
    ending: Ending
    reports: Reports
    _: KW_ONLY
    send_input: Callable[[int, bytes], None]
    stdin: Stdin
    screen: Screen
    observers: Sequence[Observer] = ()
    _input_for: int = 0  # the worker that asked for input last

    def run(self, events: SimpleQueue[Event]) -> JobOutcome:
        """Handles events until no worker runs and none will, and returns the outcome."""
        ending, judgement = self.ending, self.judgement
        while (ending.running or (ending.outcome is None and judgement.goes_on)) and not ending.gave_up:
            time_left = ending.time_left_s()
            ring = ending.ring
            if time_left is None:
                time_left, ring = judgement.time_left_s(), judgement.time_passes
            for left, react in self._others():
                if left is not None and (time_left is None or left < time_left):
                    time_left, ring = left, react
            # Checked first: while workers write without a pause, the queue is never empty.
            if time_left is not None and time_left <= 0:
                ring()
                continue
            with contextlib.suppress(Empty):
                event = events.get(timeout=time_left)
                for observer in self.observers:
                    observer.on_event(event)
                self._on(event)
        judgement.settle()
        outcome = ending.outcome or JobOutcome()
        return replace(outcome, hasty=outcome.hasty or ending.gave_up)

    def _others(self) -> Iterator[tuple[float | None, Callable[[], None]]]:
        """Yields the seconds until each other part must be called, and what to call."""
        yield self.reports.time_left_s(), self.reports.time_passes
        for observer in self.observers:
            yield observer.time_left_s(), observer.time_passes

    def _on(self, event: Event) -> None:  # noqa: PLR0912, PLR0915  # one place for the reaction to each event
        if isinstance(event, OfWorker | Unresponsive) and event.worker not in self.ending.roster:
            # In an elastic job it has ended, or its agent was hung up on. What it has left running may still write.
            if isinstance(event, Output):
                self.screen.show(event)
            return
        match event:
            case Output():
                self.ending.roster.note(event)
                self.screen.show(event)
            case Started():
                record = self.ending.roster[event.worker]
                record.pid = event.pid
                self.ending.log(f"{self._name(event.worker)} is pid {event.pid} on {record.host}")
            case InitStarted():
                self.judgement.on_init(event)
            case InitDone():
                self.ending.log(f"{self._name(event.worker)} is connected")
                self.judgement.on_init(event)
            case InitFailed():
                what = "stands by" if event.after == 0 else "left hvd.init() with an exception"
                self.ending.log(f"{self._name(event.worker)} {what}")
                self.judgement.on_init(event)
            case Alive():
                self.judgement.on_alive(event)
            case Stalled():
                self.reports.on_stalled(event)
            case Unresponsive():
                self.reports.on_unresponsive(event)
            case StatusTold():
                self.reports.on_told(event)
            case WatchAsked() | PeakMemory() | FaultAsked():
                pass  # for observers
            case ReportAsked():
                self.reports.on_asked(event)
            case InputWanted():
                self._input_for = event.worker
                self.stdin.read()
            case InputRead():
                self.send_input(self._input_for, event.data)
            case Exited():
                self.screen.finish(event.worker)
                self.ending.running.discard(event.worker)
                self.reports.on_exit(event.worker)
                self.ending.log(f"{self._name(event.worker)} ended with exit code {shell_code(event.returncode)}")
                self.judgement.on_exit(event)
            case Refused():
                self.judgement.on_refused(event)
            case AgentSaid():
                self.screen.say(f"{event.host}: {event.text.rstrip()}")
            case Lost():
                for worker in self.ending.roster.on_host(event.host):
                    self.ending.running.discard(worker)
                    self.reports.on_exit(worker)
                self.judgement.on_lost(event)
            case LoopFailed():
                self.judgement.decide(JobOutcome(1, str(event)))
                self.ending.running.clear()  # their ends cannot be heard of
            case Interrupted():
                self.ending.interrupt(event.signum, event.at_s)
            case UserSignal():
                self.ending.pass_on(event.signum)
            case ScreenFailed():
                if self.ending.outcome is None and not self.judgement.knows_failure:
                    # When a terminal closes, the write may fail before SIGHUP arrives.
                    self.ending.effect_of = signal.SIGHUP
                self.judgement.decide(JobOutcome.without_screen(event))
                self.ending.end()
            case HostsFound() | DiscoveryFailed() | Answered() | NotThereYet():
                self.judgement.on_hosts(event)
            case ScreenDone():
                raise AssertionError(f"out of turn: {event}")

    def _name(self, number: int) -> str:
        return self.ending.roster.name([number])


# A frame with one piece fits in an empty pipe. The agent's is empty when it asks, so sending never blocks.
_PIECE_BYTES = 1 << 15
_BACKGROUND_S = 0.3


class Stdin:
    """Answers each `read` with one event `InputRead`; an empty one is the end of the input."""

    def __init__(self, events: SimpleQueue[Event], fd: int = 0) -> None:
        self._events = events
        self._fd = fd
        self._asked: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="stdin").start()

    def read(self) -> None:
        self._asked.put(None)

    def _work(self) -> None:
        # SIGTTIN stops a background job that reads its terminal; where it is blocked, the read fails instead. Blocked
        # in this thread only, since child processes inherit the mask of the thread that starts them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        data = b"-"
        while data:
            self._asked.get()
            data = self._read()
            self._events.put(InputRead(data))

    def _read(self) -> bytes:
        while True:
            try:
                return os.read(self._fd, _PIECE_BYTES)
            except BlockingIOError:  # a process that shares the descriptor made it non-blocking
                select.select([self._fd], [], [])
            except OSError as error:
                if error.errno != errno.EIO or not self._in_background():
                    return b""  # it cannot be read any more
                time.sleep(_BACKGROUND_S)  # nothing notifies us when the job is in the foreground again

    def _in_background(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) != os.getpgrp()
        except OSError:
            return False


def echoes(fd: int = 0) -> bool:
    """Whether ``fd`` is a terminal that shows what is typed."""
    try:
        return bool(termios.tcgetattr(fd)[3] & termios.ECHO)
    except termios.error:
        return False
