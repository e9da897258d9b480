"""The supervisor's decisions, tested with scripted events: no process, no thread, no real time."""

import errno
import signal
from dataclasses import dataclass, replace
from queue import Empty

import pytest
from hvdlite_launcher.job.supervisor import Supervisor
from hvdlite_launcher.plan.hosts import Host, plan_slots
from hvdlite_launcher.protocol.messages import (
    Event,
    Exited,
    InitDone,
    InitFailed,
    InitStarted,
    InputRead,
    InputWanted,
    Interrupted,
    LoopFailed,
    Lost,
    Output,
    Refused,
    ScreenFailed,
    Started,
    UserSignal,
)
from hvdlite_launcher.status.reports import Reports
from hvdlite_launcher.workers.ending import FAILURE_GRACE_S, SAME_SIGNAL_S, Ending, Roster
from hvdlite_launcher.workers.first_failure import PEER_LEFT_S, PEER_LOST_S, SAME_TIME_S, FirstFailure

GRACE = 30.0  # the grace after a signal to the launcher
INT, TERM, KILL, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP
TIME_PASSES = object()  # stands for the time until the supervisor's next timeout, in which nothing happens


TWO = (Host("localhost", 2),)
THREE = (Host("localhost", 3),)


@dataclass
class Late:
    """An event that comes after a time; until then the queue of events is never empty."""

    delay_s: float
    event: Event


def says(worker, words=b"why\n", stream="stderr"):
    return Output(worker, stream, words)


class Alarms:
    """An observer that is to be called at some times, and notes when it was."""

    def __init__(self, *at_s):
        self._at_s = list(at_s)
        self.called_at_s = []
        self.clock = None

    def on_event(self, event):
        pass

    def time_left_s(self):
        return self._at_s[0] - self.clock() if self._at_s else None

    def time_passes(self):
        self._at_s.pop(0)
        self.called_at_s.append(self.clock())


class Played:
    """Runs the supervisor over a script: its outcome, the signals that it sent and when, and what it showed."""

    def __init__(self, *script, hosts=TWO, grace=GRACE, workers=None, observers=()):
        self.signals = []
        self.shown = []
        self.said = []
        self.reads = 0
        self.sent = []
        self.sent_to = []
        self._now = 0.0
        self._script = list(script)
        workers = workers or {slot.number: slot for slot in plan_slots(hosts)}
        roster = Roster()
        for number, slot in workers.items():
            roster.add(number, slot.host.label, slot.rank)
        ending = Ending(
            roster,
            signal_workers=lambda numbers, signum: self.signals.append((self._now, list(numbers), signum)),
            say=self.say,
            log=lambda text: None,
            grace=grace,
            clock=lambda: self._now,
        )
        ending.running.update(workers)
        judgement = FirstFailure(workers, ending, start_timeout_s=60)
        reports = Reports(ending, lambda _: None, directory=None)
        for each in observers:
            each.clock = lambda: self._now
        supervisor = Supervisor(
            judgement,
            ending,
            reports,
            send_input=self._send,
            stdin=self,
            screen=self,
            observers=observers,
        )
        self.outcome = supervisor.run(self)
        assert not self._script, "the loop ended before its script"

    @property
    def exit_code(self):
        return self.outcome.exit_code

    @property
    def report(self):
        return self.outcome.message

    # methods of the queue of events

    def get(self, timeout):
        assert self._script, f"the loop still waits, for {timeout} s"
        event = self._script.pop(0)
        if event is TIME_PASSES:
            assert timeout is not None, "the loop would wait for ever"
            self._now = round(self._now + timeout, 6)
            raise Empty
        if isinstance(event, Late):
            self._now += event.delay_s
            return event.event
        return event

    # methods of the standard input

    def read(self):
        self.reads += 1

    def _send(self, worker, data):
        self.sent_to.append(worker)
        self.sent.append(data)

    # methods of the screen

    def show(self, output):
        self.shown.append(output)

    def finish(self, worker):
        self.shown.append(f"end of {worker}")

    def say(self, text):
        self.said.append(text)


def test_a_job_whose_workers_all_end_well_ends_well():
    played = Played(Started(0, 10), Started(1, 11), Exited(1, 0), Exited(0, 0))
    assert (played.exit_code, played.report, played.signals) == (0, "", [])


def test_the_first_failure_gives_the_exit_code_and_ends_the_others():
    played = Played(says(1), Exited(1, 3), Exited(0, -15))
    assert played.exit_code == 3
    assert played.signals == [(0, [0], TERM)]


def test_of_several_that_are_to_be_called_at_a_time_each_is_called_at_its_own():
    soon, late = Alarms(1.0, 4.0), Alarms(3.0)
    Played(TIME_PASSES, TIME_PASSES, TIME_PASSES, Exited(0, 0), Exited(1, 0), observers=[late, soon])
    assert (soon.called_at_s, late.called_at_s) == ([1.0, 4.0], [3.0])


def test_a_worker_that_ends_well_early_does_not_end_the_job():
    assert Played(Exited(1, 0), Exited(0, 4)).exit_code == 4


@pytest.mark.parametrize("script", [(Exited(1, 0), InitStarted(0)), (InitStarted(0), Exited(1, 0))])
def test_a_rank_that_ends_without_the_init_in_which_another_waits_is_the_cause_at_once(script):
    played = Played(*script, Exited(0, -15))
    assert played.exit_code == 1
    assert played.report == "rank 1 ended with exit code 0 without calling hvd.init(), in which rank 0 waits"
    assert played.signals == [(0, [0], TERM)]


def test_all_that_wait_in_init_and_all_that_never_came_are_named():
    four = (Host("localhost", 4),)
    script = (Exited(3, 0), Started(1, 10), Exited(1, 0), InitStarted(2), Exited(0, -15), Exited(2, -15))
    played = Played(*script, hosts=four)
    assert played.report == "ranks 1, 3 ended with exit code 0 without calling hvd.init(), in which rank 2 waits"


@pytest.mark.parametrize(
    "script",
    [
        (Exited(0, 0), Exited(1, 0)),
        (InitStarted(0), InitStarted(1), InitDone(0), Exited(0, 0), InitDone(1), Exited(1, 0)),
        (InitStarted(0), InitStarted(1), InitDone(0), InitDone(1), Exited(0, 0), Exited(1, 0)),
        (InitStarted(0), InitDone(0), Exited(1, 0), Exited(0, 0)),
        (InitStarted(0), Exited(0, 0), Exited(1, 0)),
        (InitStarted(0), InitFailed(0), Exited(1, 0), Exited(0, 0)),
    ],
)
def test_ranks_that_have_called_init_or_that_nobody_waits_for_may_end(script):
    played = Played(*script)
    assert (played.exit_code, played.report, played.signals) == (0, "", [])


CONNECTED = (InitStarted(0), InitStarted(1), InitDone(0), InitDone(1))


@pytest.mark.parametrize(
    "script",
    [
        (InitStarted(1), InitFailed(1), Exited(1, 0), InitStarted(0)),
        (InitStarted(1), InitFailed(1), InitStarted(0), Exited(1, 0)),
        (InitStarted(0), InitStarted(1), InitFailed(1), Exited(1, 0)),
        (InitStarted(0), InitStarted(1), Exited(1, 0)),
        (*CONNECTED, Exited(1, 0), InitStarted(0)),
        (*CONNECTED, InitStarted(0), Exited(1, 0)),
        (*CONNECTED, InitStarted(1), InitFailed(1), InitStarted(0), Exited(1, 0)),
    ],
)
def test_a_rank_that_ends_without_a_connection_by_the_init_in_which_another_waits_is_the_cause_at_once(script):
    played = Played(*script, Exited(0, -15))
    assert played.exit_code == 1
    assert played.report == (
        "rank 1 ended with exit code 0 without a connection by the hvd.init() in which rank 0 waits"
    )
    assert played.signals == [(0, [0], TERM)]


def test_a_rank_that_tries_again_after_it_gave_up_waits_again():
    assert Played(InitStarted(0), InitFailed(0), Exited(1, 0), InitStarted(0), Exited(0, -15)).exit_code == 1


def test_a_rank_that_is_missed_after_a_failure_changes_nothing():
    assert Played(Exited(0, 3), InitStarted(1), Exited(1, 0)).exit_code == 3


def test_death_by_a_signal_gives_128_more():
    played = Played(Exited(1, -9), Exited(0, -15))
    assert played.exit_code == 137
    assert "killed by SIGKILL" in played.report


def test_who_fails_after_the_first_is_not_the_cause():
    assert Played(Exited(1, 3), Exited(0, 5)).exit_code == 3


def test_who_ignores_the_signal_is_killed_after_the_grace():
    played = Played(says(1), Exited(1, 3), TIME_PASSES, Exited(0, -9))
    assert played.signals == [(0, [0], TERM), (FAILURE_GRACE_S, [0], KILL)]
    assert played.exit_code == 3


def test_a_grace_that_is_shorter_than_what_a_failure_gives_counts_there_too():
    assert Played(says(1), Exited(1, 3), TIME_PASSES, Exited(0, -9), grace=1).signals == [
        (0, [0], TERM),
        (1, [0], KILL),
    ]


def test_who_ends_within_the_grace_is_not_signalled_again():
    played = Played(says(1), Exited(1, 3), Exited(0, -15), TIME_PASSES, Exited(2, -9), hosts=THREE)
    assert played.signals == [(0, [0, 2], TERM), (FAILURE_GRACE_S, [2], KILL)]


def test_a_flood_of_output_does_not_put_off_the_kill():
    flood = [Late(1.0, Output(0, "stdout", b"y\n"))] * 3
    played = Played(says(1), Exited(1, 3), *flood, Exited(0, -9))
    assert played.signals == [(0, [0], TERM), (FAILURE_GRACE_S, [0], KILL)]


def test_without_grace_the_others_are_killed_at_once():
    assert Played(says(1), Exited(1, 3), Exited(0, -9), grace=0).signals == [(0, [0], KILL)]


def test_an_end_that_is_never_reported_is_not_waited_for_for_ever():
    played = Played(says(1), Exited(1, 3), TIME_PASSES, TIME_PASSES)
    assert played.outcome.hasty
    assert played.exit_code == 3


def test_the_report_names_the_worker_and_ends_with_its_last_words():
    played = Played(
        Started(0, 10),
        Started(1, 11),
        Output(1, "stderr", b"Traceback (most recent call last):\nValueError: x\n"),
        Output(0, "stderr", b"of another\n"),
        Output(1, "stdout", b"no error\n"),
        Exited(1, 3),
        Exited(0, -15),
    )
    assert played.report == (
        "rank 1 on localhost (pid 11) failed first, with exit code 3. The end of its stderr:\n"
        "    Traceback (most recent call last):\n"
        "    ValueError: x"
    )


def test_output_is_shown_in_order_and_finished_when_its_worker_ends():
    outputs = [Output(0, "stdout", b"a"), Output(0, "stderr", b"b")]
    assert Played(*outputs, Exited(0, 0), Exited(1, 0)).shown == [*outputs, "end of 0", "end of 1"]


def test_input_is_read_when_it_is_wanted_and_sent_when_it_came():
    played = Played(InputWanted(0), InputRead(b"a"), InputWanted(0), InputRead(b""), Exited(0, 0), Exited(1, 0))
    assert (played.reads, played.sent) == (2, [b"a", b""])


# ------------------------------------------------- ranks that end alike, and which of them said why


def test_of_ranks_that_end_alike_one_that_said_why_is_quoted():
    played = Played(says(0, b"bad config\n"), Exited(1, 2), Exited(2, 2), Exited(0, 2), hosts=THREE)
    assert (played.exit_code, played.outcome.rank, played.signals) == (2, 1, [])
    assert played.report.startswith("rank 1 on localhost (pid 0) failed first, with exit code 2. It wrote nothing")
    assert played.report.endswith("The end of its stderr:\n    bad config")


def test_once_one_that_ended_alike_has_said_why_nobody_is_waited_for():
    played = Played(Exited(1, 2), says(0), Exited(0, 2), Exited(2, -15), hosts=THREE)
    assert played.signals == [(0, [2], TERM)]


def test_the_exit_code_is_the_firsts_whatever_another_says():
    played = Played(Exited(1, 4), says(0), Exited(0, 2))
    assert played.exit_code == 4
    assert "rank 0 on localhost (pid 0) failed within half a second of it, with exit code 2" in played.report


def test_the_others_are_left_alone_for_half_a_second_where_the_first_said_nothing():
    played = Played(Exited(1, 2), TIME_PASSES, TIME_PASSES, Exited(0, -9))
    assert played.signals == [(SAME_TIME_S, [0], TERM), (SAME_TIME_S + FAILURE_GRACE_S, [0], KILL)]
    assert played.report.endswith("It wrote nothing to stderr.")


def test_who_fails_when_that_time_is_over_or_because_of_our_signal_is_not_quoted():
    for end in (Exited(0, 2), Exited(0, -15), Exited(0, 143)):
        played = Played(Exited(1, 2), TIME_PASSES, says(0), end)
        assert (played.exit_code, "rank 0" in played.report) == (2, False)


def test_nor_who_only_lost_a_peer():
    played = Played(Exited(1, 2), says(0, b"PeerLostError\n"), Exited(0, 1, peer_lost=True))
    assert played.report == "rank 1 on localhost (pid 0) failed first, with exit code 2. It wrote nothing to stderr."


def test_a_worker_killed_by_a_signal_has_said_why_it_failed():
    played = Played(Exited(1, -9), says(0, b"Connection reset by peer\n"), Exited(0, 1))
    assert played.signals == [(0, [0], TERM)]
    assert "rank 0" not in played.report


def test_what_the_first_wrote_to_stdout_is_shown_if_nobody_wrote_to_stderr():
    played = Played(says(1, b"bad config\n", "stdout"), Exited(1, 2), Exited(0, 2))
    assert played.report.endswith("It wrote nothing to stderr. The end of its stdout:\n    bad config")


def test_what_else_happens_while_the_others_may_say_why_is_not_the_cause():
    hosts = (Host("a", 2), Host("b", 1))
    lost = Played(Exited(1, 3), Lost("b", "cut"), Exited(0, -15), hosts=hosts)
    refused = Played(Exited(1, 3), Refused("no such command", 127), hosts=hosts)
    for played in (lost, refused):
        assert (played.exit_code, played.outcome.rank) == (3, 1)


def test_but_a_signal_is_as_a_scheduler_may_have_sent_it_to_the_workers_too():
    played = Played(Exited(1, 1), Interrupted(TERM), TIME_PASSES, Exited(0, -9))
    assert (played.exit_code, played.report) == (143, "")
    assert played.signals == [(0, [0], TERM), (GRACE, [0], KILL)]


def test_a_silent_failure_after_a_peer_was_lost_does_not_prolong_the_end():
    late = PEER_LOST_S - 0.1
    played = Played(
        Exited(0, 1, peer_lost=True), Late(late, Exited(1, 3)), TIME_PASSES, TIME_PASSES, Exited(2, -9), hosts=THREE
    )
    assert played.signals == [(PEER_LOST_S, [2], TERM), (PEER_LOST_S + FAILURE_GRACE_S, [2], KILL)]
    assert (played.exit_code, played.outcome.rank) == (3, 1)


# ---------------------------------------------------------- who lost a peer


def test_who_lost_a_peer_is_not_the_cause_if_the_peer_fails_after_it():
    played = Played(Exited(0, 1, peer_lost=True), Exited(1, 3))
    assert played.exit_code == 3
    assert "rank 1" in played.report


def test_nobody_is_signalled_while_the_lost_peer_may_still_fail_by_itself():
    played = Played(Exited(0, 1, peer_lost=True), Exited(2, 1, peer_lost=True), Exited(1, -9), hosts=THREE)
    assert played.signals == []
    assert played.exit_code == 137


def test_who_lost_a_peer_is_the_cause_if_no_other_fails_soon():
    played = Played(Exited(0, 7, peer_lost=True), TIME_PASSES, Exited(1, -15))
    assert played.exit_code == 7
    assert "rank 0" in played.report
    assert played.signals == [(PEER_LOST_S, [1], TERM)]


def test_the_first_who_lost_a_peer_is_the_cause_if_all_did():
    played = Played(Exited(1, 7, peer_lost=True), Exited(0, 8, peer_lost=True))
    assert played.exit_code == 7


@pytest.mark.parametrize(("returncode", "exit_code"), [(0, 1), (7, 7)])
def test_a_peer_that_was_ending_its_program_has_the_time_for_it(returncode, exit_code):
    left = Late(PEER_LEFT_S - 0.1, Exited(1, returncode, left=True))
    played = Played(Exited(0, 1, peer_lost=True, peer_left=True), left)
    assert played.signals == []
    assert played.exit_code == exit_code
    ended_well = "rank 1 had ended with exit code 0 before the others; of these, rank 0"
    assert played.report.startswith(ended_well if returncode == 0 else "rank 1 on")


def test_a_peer_that_ended_well_too_early_is_named_with_the_failure():
    played = Played(Exited(1, 0), Exited(0, 1, peer_lost=True))
    assert played.exit_code == 1
    assert played.report.startswith("rank 1 had ended with exit code 0 before the others; of these, rank 0 on")


def test_a_rank_that_left_is_the_cause_also_when_it_takes_long_to_end():
    played = Played(Exited(0, 1, peer_lost=True), TIME_PASSES, Exited(1, 7, left=True))
    assert played.exit_code == 7
    assert played.report.startswith("rank 1 on localhost")


def test_a_rank_that_left_with_0_is_told_also_when_it_takes_long_to_end():
    played = Played(Exited(0, 5, peer_lost=True), TIME_PASSES, Exited(1, 0, left=True))
    assert played.exit_code == 5
    assert played.report.startswith("rank 1 had ended with exit code 0 before the others; of these, rank 0 on")


def test_a_rank_that_left_and_took_so_long_that_it_was_killed_is_not_the_cause():
    played = Played(Exited(0, 1, peer_lost=True), TIME_PASSES, TIME_PASSES, Exited(1, -9, left=True))
    assert played.exit_code == 1
    assert played.report.startswith("rank 0 on localhost")


def test_a_rank_that_left_after_another_failed_is_not_the_cause():
    played = Played(Exited(0, 3), Exited(1, 7, left=True))
    assert played.exit_code == 3


def test_a_job_of_which_one_lost_a_peer_is_gone_within_5_seconds():
    played = Played(Exited(0, 7, peer_lost=True), TIME_PASSES, TIME_PASSES, Exited(1, -9))
    assert played.signals[-1] == (PEER_LOST_S + FAILURE_GRACE_S, [1], KILL)
    assert PEER_LOST_S + FAILURE_GRACE_S < 5


# --------------------------------------------------------------- interrupts


@pytest.mark.parametrize(("signum", "exit_code"), [(INT, 130), (TERM, 143), (HUP, 129)])
def test_a_signal_to_the_launcher_is_passed_on_and_is_the_cause(signum, exit_code):
    played = Played(Interrupted(signum), Exited(0, 1), TIME_PASSES, Exited(1, -9))
    assert played.signals == [(0, [0, 1], signum), (GRACE, [1], KILL)]
    assert (played.exit_code, played.report) == (exit_code, "")


@pytest.mark.parametrize(
    ("signum", "again"), [(INT, "Ctrl-C again"), (TERM, "a second signal"), (HUP, "a second signal")]
)
def test_a_signal_to_the_launcher_is_told_with_how_long_it_waits(signum, again):
    said = (
        f"{signum.name} passed on to 2 workers: what still runs in 30 s is killed "
        f"({again}: at once; --grace sets the time)"
    )
    assert Played(Interrupted(signum), Exited(0, 0), Exited(1, 0)).said == [said]


def test_workers_may_take_as_long_as_the_grace_says_up_to_a_day():
    played = Played(Interrupted(TERM), Exited(1, 0), TIME_PASSES, Exited(0, -9), grace=86400)
    assert played.signals == [(0, [0, 1], TERM), (86400, [0], KILL)]
    assert "in 86400 s" in played.said[0]


def test_who_did_not_end_within_the_grace_is_named():
    played = Played(Interrupted(TERM), Exited(1, 0), TIME_PASSES, Exited(0, -9))
    assert played.said[1:] == ["rank 0 still ran after 30 s: killed (--grace)"]
    after_a_failure = Played(Exited(1, 1), TIME_PASSES, TIME_PASSES, Exited(0, -9))
    assert after_a_failure.said == []


def test_without_grace_a_signal_kills_at_once_and_says_so():
    played = Played(Interrupted(TERM), Exited(0, -9), Exited(1, -9), grace=0)
    assert played.signals == [(0, [0, 1], KILL)]
    assert (played.exit_code, played.said) == (143, ["SIGTERM: 2 workers killed at once (--grace 0)"])


def test_who_is_lost_or_fails_while_others_write_their_checkpoint_is_neither_named_nor_ends_their_time():
    hosts = (Host("a", 2), Host("b", 1))
    ends = Exited(1, 1, peer_lost=True), Late(5, Lost("b", "cut")), TIME_PASSES, Exited(0, 0, left=True)
    played = Played(Interrupted(TERM), *ends, hosts=hosts)
    assert played.signals == [(0, [0, 1, 2], TERM), (GRACE, [0], KILL)]
    assert (played.exit_code, played.report) == (143, "")


def test_where_no_agent_is_heard_any_more_the_job_ends_and_its_workers_are_not_waited_for():
    played = Played(LoopFailed("out of memory"))
    assert (played.exit_code, played.signals) == (1, [])
    assert played.report == "the launcher's connections to its agents failed: out of memory"


def test_a_screen_that_is_gone_does_not_shorten_the_time_after_a_hangup():
    gone = ScreenFailed("stderr", OSError(errno.EIO, "Input/output error"))
    played = Played(Interrupted(HUP), gone, TIME_PASSES, Exited(0, -9), Exited(1, -9))
    assert played.signals == [(0, [0, 1], HUP), (GRACE, [0, 1], KILL)]
    assert played.exit_code == 129


def test_nor_where_it_is_gone_before_the_hangup_is_heard_of():
    gone = ScreenFailed("stdout", OSError(errno.EIO, "Input/output error"))
    played = Played(gone, Interrupted(HUP), TIME_PASSES, Exited(0, -9), Exited(1, -9))
    assert played.signals == [(0, [0, 1], TERM), (GRACE, [0, 1], KILL)]
    assert (played.exit_code, played.report) == (129, "")


@pytest.mark.parametrize("end", [Exited(1, -TERM), Exited(1, 128 + TERM)])
def test_a_worker_that_the_same_signal_ended_before_it_reached_the_launcher_is_not_the_cause(end):
    played = Played(end, Interrupted(TERM), TIME_PASSES, Exited(0, -9))
    assert played.signals == [(0, [0], TERM), (GRACE, [0], KILL)]
    assert (played.exit_code, played.report) == (143, "")


def test_interrupted_twice_the_workers_are_killed_at_once():
    played = Played(Interrupted(INT), Late(1, Interrupted(INT)), Exited(0, -9), Exited(1, -9))
    assert played.signals == [(0, [0, 1], INT), (1, [0, 1], KILL)]
    assert played.exit_code == 130
    assert played.said[1:] == ["SIGINT: 2 workers killed at once"]


def test_a_signal_that_comes_twice_in_a_moment_is_one():
    twice = Interrupted(TERM), Interrupted(TERM), Late(SAME_SIGNAL_S / 2, Interrupted(HUP))
    played = Played(*twice, Exited(0, 0), Exited(1, 0))
    assert played.signals == [(0, [0, 1], TERM)]
    assert len(played.said) == 1


def test_so_it_is_where_the_launcher_comes_to_it_only_later():
    twice = Interrupted(TERM, 0.0), Late(10 * SAME_SIGNAL_S, Interrupted(TERM, SAME_SIGNAL_S / 2))
    played = Played(*twice, Exited(0, 0), Exited(1, 0))
    assert played.signals == [(0, [0, 1], TERM)]
    assert len(played.said) == 1


def test_a_third_signal_changes_nothing_any_more():
    thrice = Interrupted(TERM), Late(1, Interrupted(TERM)), Late(0.5, Interrupted(TERM))
    played = Played(*thrice, TIME_PASSES)
    assert played.signals == [(0, [0, 1], TERM), (1, [0, 1], KILL)]
    assert len(played.said) == 2


def test_interrupted_while_a_failure_ends_the_job_the_failure_stays_the_cause():
    played = Played(says(1), Exited(1, 3), Interrupted(INT), Exited(0, -9))
    assert played.signals == [(0, [0], TERM), (0, [0], KILL)]
    assert played.exit_code == 3


def test_interrupted_while_a_peer_is_waited_for_the_interrupt_is_the_cause():
    played = Played(Exited(0, 1, peer_lost=True), Interrupted(INT), TIME_PASSES, Exited(1, -9))
    assert played.exit_code == 130
    assert played.signals == [(0, [1], INT), (GRACE, [1], KILL)]


# ------------------------------------------------------- agents and the screen


def test_a_lost_agent_is_named_by_its_host_and_ends_the_rest():
    hosts = (Host("a", 1), Host("b", 1))
    played = Played(Lost("a", "its hvdlite agent ended unexpectedly"), Exited(1, -15), hosts=hosts)
    assert played.exit_code == 1
    words = "lost a: its hvdlite agent ended unexpectedly. If it still runs, it kills its workers by itself"
    assert played.report == words
    assert played.signals == [(0, [1], TERM)]


def test_of_this_host_it_is_known_that_the_workers_of_a_lost_agent_were_killed():
    played = Played(
        Lost("localhost", "its hvdlite agent was killed by SIGKILL"), hosts=(Host("localhost", 1, is_here=True),)
    )
    assert played.report == "lost localhost: its hvdlite agent was killed by SIGKILL. Its workers were killed"


def test_a_reason_of_ssh_that_ends_with_a_full_stop_is_followed_by_no_second_one():
    hosts = (Host("a", 1), Host("b", 1))
    played = Played(Lost("a", "Connection to a closed by remote host."), Exited(1, -15), hosts=hosts)
    assert played.report.startswith("lost a: Connection to a closed by remote host. If it still runs")


def test_an_agent_that_is_lost_after_a_failure_is_not_the_cause():
    assert Played(Exited(1, 3), Lost("localhost", "its agent ended")).exit_code == 3


def test_a_command_that_cannot_be_started_ends_the_job_with_the_code_of_a_shell():
    played = Played(Started(0, 1), Refused("pyhton: command not found", 127))
    assert (played.exit_code, played.report) == (127, "pyhton: command not found")


def test_a_reader_that_goes_away_ends_the_job_as_sigpipe_would():
    played = Played(ScreenFailed("stdout", BrokenPipeError(errno.EPIPE, "Broken pipe")), Exited(0, 0), Exited(1, 0))
    assert (played.exit_code, played.report) == (141, "")
    assert played.signals == [(0, [0, 1], TERM)]


def test_a_full_disk_is_named():
    error = OSError(errno.ENOSPC, "No space left on device")
    played = Played(ScreenFailed("stdout", error), Exited(0, 0), Exited(1, 0))
    assert (played.exit_code, played.report) == (1, "cannot write to stdout: No space left on device")


# ------------------------------------------------------------- ranks that are late


def test_a_rank_that_ends_well_without_ever_coming_to_init_is_the_cause_at_once():
    played = Played(InitStarted(0), Exited(1, 0), Exited(0, -TERM))
    assert played.exit_code == 1
    assert played.report == "rank 1 ended with exit code 0 without calling hvd.init(), in which rank 0 waits"
    assert played.signals == [(0.0, [0], TERM)]


def test_the_same_where_it_ends_before_the_first_comes():
    assert "rank 1 ended with exit code 0" in Played(Exited(1, 0), InitStarted(0), Exited(0, -TERM)).report


def test_ranks_that_never_call_init_may_take_their_time():
    assert Played(Late(1000, Output(0, "stdout", b"x")), Exited(0, 0), Exited(1, 0)).exit_code == 0


def test_a_rank_that_does_not_come_to_init_in_time_is_named_with_its_host():
    hosts = (Host("a", 2), Host("b", 1))
    script = InitStarted(0), InitStarted(2), TIME_PASSES, Exited(0, -TERM), Exited(1, -TERM), Exited(2, -TERM)
    played = Played(*script, hosts=hosts)
    assert played.exit_code == 1
    assert played.report == (
        "rank 1 on a did not call hvd.init() within 60 s (--start-timeout) of the first rank that did; "
        "ranks 0, 2 wait there"
    )
    assert played.signals == [(60.0, [0, 1, 2], TERM)]


def test_ranks_that_cannot_connect_in_time_are_told_from_those_that_did_not_come():
    played = Played(InitStarted(0), InitStarted(1), TIME_PASSES, Exited(0, -TERM), Exited(1, -TERM))
    assert played.report.startswith("ranks 0, 1 on localhost called hvd.init(), but did not connect to all other ranks")


def test_a_rank_whose_init_raised_and_that_goes_on_alone_is_named_after_the_timeout():
    ends = Exited(0, -TERM), Exited(1, -TERM)
    played = Played(InitStarted(0), InitStarted(1), Late(10, InitFailed(1)), TIME_PASSES, *ends)
    assert played.report == (
        "rank 1 on localhost left hvd.init() with an exception, and did not call it again within 60 s "
        "(--start-timeout); rank 0 waits there"
    )
    assert played.signals == [(70.0, [0, 1], TERM)]


def test_a_rank_that_comes_once_the_other_has_given_up_does_not_wait_for_ever():
    ends = Exited(0, -TERM), Exited(1, -TERM)
    played = Played(InitStarted(1), InitFailed(1), Late(1000, InitStarted(0)), TIME_PASSES, *ends)
    assert played.report.endswith("; rank 0 waits there")
    assert played.signals == [(1060.0, [0, 1], TERM)]


def test_ranks_that_try_again_and_again_may_take_their_time():
    tries = [event for worker in (0, 1, 0, 1, 0) for event in (Late(30, InitFailed(worker)), InitStarted(worker))]
    played = Played(InitStarted(0), InitStarted(1), *tries, InitDone(0), InitDone(1), Exited(0, 0), Exited(1, 0))
    assert (played.exit_code, played.signals) == (0, [])


def test_where_all_gave_up_nobody_is_waited_for():
    gave_up = InitStarted(0), InitStarted(1), InitFailed(0), InitFailed(1)
    assert Played(*gave_up, Late(1000, Output(0, "stdout", b"x")), Exited(0, 0), Exited(1, 0)).exit_code == 0


def test_once_all_are_connected_nobody_counts_any_more():
    joined = InitStarted(0), InitStarted(1), InitDone(0), InitDone(1)
    again = InitStarted(0), Late(1000, Output(0, "stdout", b"x")), InitStarted(1), InitDone(0), InitDone(1)
    assert Played(*joined, *again, Exited(0, 0), Exited(1, 0)).exit_code == 0


def test_a_failure_while_others_wait_in_init_is_the_cause():
    played = Played(InitStarted(0), Exited(1, 3), Exited(0, -TERM))
    assert played.exit_code == 3
    assert "rank 1" in played.report


# ---------------------------------------------- numbers, by which workers are known, and ranks

# The workers that were rank 0 and rank 1 at first are rank 1 and rank 0 now.
SWAPPED = {slot.number: replace(slot, rank=1 - slot.rank) for slot in plan_slots(TWO)}


def test_workers_are_signalled_by_number_and_named_by_rank():
    played = Played(Started(0, 10), Started(1, 11), says(1), Exited(1, 3), Exited(0, -TERM), workers=SWAPPED)
    assert (played.outcome.rank, played.signals) == (0, [(0, [0], TERM)])
    assert played.report.startswith("rank 0 on localhost (pid 11) failed first, with exit code 3.")


def test_who_does_not_come_to_init_is_named_by_rank():
    played = Played(InitStarted(0), TIME_PASSES, Exited(0, -TERM), Exited(1, -TERM), workers=SWAPPED)
    assert played.report.startswith("rank 0 on localhost did not call hvd.init()")
    assert played.report.endswith("rank 1 waits there")


def test_input_goes_to_the_worker_that_has_room_for_it():
    played = Played(InputWanted(1), InputRead(b"x"), Exited(0, 0), Exited(1, 0), workers=SWAPPED)
    assert played.sent_to == [1]


def test_a_signal_for_the_program_is_passed_on_and_ends_nothing():
    played = Played(UserSignal(signal.SIGUSR1), Exited(0, 0), Exited(1, 0))
    assert [(numbers, signum) for _, numbers, signum in played.signals] == [([0, 1], signal.SIGUSR1)]
    assert played.said == ["SIGUSR1 passed on to 2 workers, to the processes that handle it"]
    assert played.exit_code == 0


def test_a_signal_for_the_program_is_not_passed_on_once_the_job_ends():
    played = Played(Interrupted(TERM), UserSignal(signal.SIGUSR1), Exited(0, 0), Exited(1, 0))
    assert [signum for _, _, signum in played.signals] == [TERM]
