"""Finds the worker that failed first, in a job whose ranks stay the same, and ends the job.

    ends of workers, lost hosts, calls of hvd.init() ──► FirstFailure ──► Ending, with a JobOutcome

A worker that reports that it only lost a peer is not the cause if that peer fails within a while. A worker that failed
and wrote nothing is named together with another that failed with it and said why.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ..plan.hosts import Slot
from ..protocol.messages import Alive, Exited, HostEvent, InitDone, InitFailed, InitStarted, Lost, Refused
from ..system.process_tree import shell_code
from .ending import Ending
from .failure_message import JobOutcome, failure_message, name_ranks

# A worker that reports that it only lost a peer counts as the cause if no other fails within this time, which a peer
# with closed sockets may need to end. With FAILURE_GRACE_S it is below the 5 s that ending a failed job may take.
PEER_LOST_S = 1.5
# The same if that peer was ending its program: it needs no signal, but on a busy host it needs time.
PEER_LEFT_S = 20.0
# If the first worker to fail wrote nothing to stderr, another that fails with the same exit code may give the reason.
# For this time the others are not signalled.
SAME_TIME_S = 0.5
# A report on ranks that do not come to hvd.init() takes this long at most.
WARNS_BEFORE_S = 5.0


class FirstFailure:
    """Judges one event after another. The first cause that it finds ends the job."""

    def __init__(self, workers: Mapping[int, Slot], ending: Ending, *, start_timeout_s: float) -> None:
        """``workers`` are all workers of the job, by their numbers.

        ``start_timeout_s``: how long after the first hvd.init() all ranks must be connected.
        """
        self._ending = ending
        self._roster = ending.roster
        self._here = {slot.host.label for slot in workers.values() if slot.host.is_here}
        self._done: list[int] = []  # those with exit code 0, in order
        self._init_calls = _InitCalls(workers, start_timeout_s, ending.clock)
        self._warn: Callable[[float], object] | None = None
        self._warns_after_s = start_timeout_s - WARNS_BEFORE_S
        self._failed: list[Exited] = []  # the first to fail, if it wrote nothing, and those that failed soon after
        self._suspect: Exited | None = None
        self._blamed_suspect: Exited | None = None  # blamed for now: it only lost a peer, which may still be running
        self._settle_at: float | None = None

    def warn_with(self, warn: Callable[[float], object]) -> None:
        """Has this called once before the start timeout, with the seconds for which the first rank has waited.

        It is not if the timeout is hardly longer than a report takes.
        """
        if self._warns_after_s > WARNS_BEFORE_S:
            self._warn = warn

    @property
    def goes_on(self) -> bool:
        """Whether the job may go on though no worker runs."""
        return False

    @property
    def knows_failure(self) -> bool:
        """Whether a worker has failed on its own account."""
        return bool(self._failed)

    def on_init(self, event: InitStarted | InitDone | InitFailed) -> None:
        self._init_calls.note(event)
        if isinstance(event, InitStarted):
            self._look_for_absent()

    def on_alive(self, alive: Alive) -> None:
        """Takes a worker's answer of an elastic job, which is not judged any more."""

    def on_exit(self, end: Exited) -> None:
        if end.returncode == 0:
            self._done.append(end.worker)
        if self._ending.outcome is not None:
            if self._blamed_suspect is not None and end.left:
                self._blame_who_left(self._blamed_suspect, end)
        elif end.returncode == 0:
            self._look_for_absent()
        elif not end.peer_lost:
            self._on_failure(end)
        elif self._suspect is None and not self._failed:
            self._suspect = end
            self._settle_within(PEER_LEFT_S if end.peer_left else PEER_LOST_S)

    def _on_failure(self, end: Exited) -> None:
        self._failed.append(end)
        first = self._failed[0]
        if end is first:
            self._ending.effect_of = shell_code(end.returncode) - 128
        wrote = self._roster[end.worker].written["stderr"].lines()
        if (wrote and end.returncode == first.returncode) or first.returncode < 0:
            self.settle()
        elif end is first:
            self._settle_within(SAME_TIME_S if self._suspect is None else min(SAME_TIME_S, self.time_left_s() or 0.0))

    def on_lost(self, lost: Lost) -> None:
        why = lost.why.rstrip(".")
        # Nobody has seen the end of those on another host, whose agent kills them once it misses the launcher.
        is_seen = lost.host in self._here
        end = "Its workers were killed" if is_seen else "If it still runs, it kills its workers by itself"
        self.decide(JobOutcome(1, f"lost {lost.host}: {why}. {end}", lost_host=lost.host))
        self._ending.end()

    def on_refused(self, refused: Refused) -> None:
        where = "" if refused.host is None else f"{refused.host}: "
        self.decide(JobOutcome(refused.exit_code, where + refused.why))
        self._ending.running.clear()  # the agent will not report how the started ones end; hanging up ends them

    def on_hosts(self, event: HostEvent) -> None:
        raise AssertionError(f"out of turn: {event}")

    def decide(self, outcome: JobOutcome) -> None:
        if self._ending.outcome is None and self._failed:
            self._blame(*self._failed)
        self._ending.decide(outcome)

    def settle(self) -> None:
        """Names the worker that failed first and ends the job.

        If none failed on its own account, it names for now the worker that lost a peer.
        """
        if self._ending.outcome is not None:
            return
        if self._failed:
            self._blame(*self._failed)
        elif self._suspect is not None:
            self._blamed_suspect = self._suspect
            self._blame(self._suspect)
        else:
            return
        self._ending.end()

    def _look_for_absent(self) -> None:
        why = self._init_calls.missing_message(self._ending.running, self._done)
        if why is not None and self._ending.outcome is None:
            self.decide(JobOutcome(1, why))
            self._ending.end()

    def _blame_who_left(self, named: Exited, end: Exited) -> None:
        """Blames the worker that left (`Exited.left`), unless it returned 0, or our SIGKILL ended it.

        It may end long after the others noticed, and ignores SIGTERM.
        """
        self._blamed_suspect = None
        was_killed_here = self._ending.has_killed and end.returncode == -signal.SIGKILL
        self._blame(named if end.returncode == 0 or was_killed_here else end)

    def _blame(self, first: Exited, *others: Exited) -> None:
        words = failure_message(self._roster.failure(first), [self._roster.failure(other) for other in others])
        if first.peer_lost and self._done:
            words = f"{self._roster.name(self._done)} had ended with exit code 0 before the others; of these, {words}"
        self._ending.outcome = JobOutcome(shell_code(first.returncode), words, rank=self._roster[first.worker].rank)

    def _settle_within(self, delay_s: float) -> None:
        self._settle_at = self._ending.clock() + delay_s

    def time_left_s(self) -> float | None:
        if self._settle_at is not None:
            return self._settle_at - self._ending.clock()
        left_s = self._init_calls.time_left_s()
        return left_s if left_s is None or self._warn is None else left_s - WARNS_BEFORE_S

    def time_passes(self) -> None:
        if self._settle_at is not None:
            self._settle_at = None
            self.settle()
        elif self._warn is not None:
            warn, self._warn = self._warn, None
            warn(self._warns_after_s)
        else:
            self.decide(JobOutcome(1, self._init_calls.timeout_message()))
            self._ending.end()


class _InitCalls:
    """The workers that have called hvd.init(), which waits for all of them, and those that are connected.

    All ranks must be connected within the start timeout. It begins at the first call of hvd.init() by any rank, since
    before that nobody knows whether the program will call it, and anew when the call of one rank raises an exception
    while others wait: its program may try again or go on alone. Once all have been connected, it is over for good.
    """

    def __init__(self, workers: Mapping[int, Slot], start_timeout_s: float, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._late_at: float | None = None
        self._were_connected = False
        self._calls: Counter[int] = Counter()  # of hvd.init(), by the worker's number
        self._gave_up: set[int] = set()  # the workers whose last hvd.init() has raised an exception
        self._connected: set[int] = set()  # the workers whose last hvd.init() has succeeded

    def note(self, event: InitStarted | InitDone | InitFailed) -> None:
        worker = event.worker
        self._gave_up.discard(worker)
        self._connected.discard(worker)
        match event:
            case InitStarted():
                self._calls[worker] += 1
                if self._late_at is None:
                    self._begin_timeout()
            case InitFailed():
                self._gave_up.add(worker)
                self._late_at = None
                if self._waiting():
                    self._begin_timeout()
            case InitDone():
                self._connected.add(worker)
                if len(self._connected) == len(self._workers):
                    self._late_at, self._were_connected = None, True

    def _begin_timeout(self) -> None:
        if not self._were_connected:
            self._late_at = self._clock() + self._start_timeout_s

    def _waiting(self) -> set[int]:
        return self._calls.keys() - self._connected - self._gave_up

    def time_left_s(self) -> float | None:
        return None if self._late_at is None else self._late_at - self._clock()

    def timeout_message(self) -> str:
        """Ends the timeout and returns a message that names the ranks for which the others wait."""
        self._late_at = None
        within = f"within {self._start_timeout_s:g} s (--start-timeout)"
        of_first = f"{within} of the first rank that did"
        waiting = self._waiting()
        waits = f"{self._waits(waiting)} there"
        if absent := self._workers.keys() - self._calls.keys():
            return f"{self._named(absent)} did not call hvd.init() {of_first}; {waits}"
        if self._gave_up:
            what = f"left hvd.init() with an exception, and did not call it again {within}"
            return f"{self._named(self._gave_up)} {what}; {waits}"
        return (
            f"{self._named(waiting)} called hvd.init(), but did not connect to all other ranks {of_first}: does a "
            "firewall block them, or is it the wrong network? hvdlite-run --check shows that, and --network-interface "
            "chooses another"
        )

    def missing_message(self, running: Collection[int], done: Collection[int]) -> str | None:
        """Returns a message if ``running`` ranks wait in hvd.init() for ``done`` ones that cannot come; or None."""
        waiting = self._waiting().intersection(running)
        if not waiting:
            return None
        last_call = max(self._calls[worker] for worker in waiting)
        # One that was connected by that same call came: the others are about to be.
        came = {worker for worker in self._connected if self._calls[worker] >= last_call}
        absent = set(done) - came
        if not absent:
            return None
        did_call = absent.intersection(self._calls)
        how = "a connection by the hvd.init()" if did_call else "calling hvd.init(),"
        return f"{self._ranks(absent)} ended with exit code 0 without {how} in which {self._waits(waiting)}"

    def _waits(self, numbers: Collection[int]) -> str:
        return f"{self._ranks(numbers)} {'waits' if len(numbers) == 1 else 'wait'}"

    def _named(self, numbers: Collection[int]) -> str:
        slots = sorted((self._workers[number] for number in numbers), key=lambda slot: slot.rank)
        hosts = ", ".join(dict.fromkeys(slot.host.label for slot in slots))
        return f"{self._ranks(numbers)} on {hosts}"

    def _ranks(self, numbers: Collection[int]) -> str:
        return name_ranks([self._workers[number].rank for number in numbers])
