"""Running one command on several hosts and collecting its output, tested with scripted events."""

import signal

import pytest
from hvdlite_launcher.agents.wait_for_agents import SignalledError
from hvdlite_launcher.check.run_check import Reply, ReplyCollector
from hvdlite_launcher.errors import LauncherError
from hvdlite_launcher.plan.hosts import Host
from hvdlite_launcher.protocol.messages import (
    AgentSaid,
    Exited,
    Interrupted,
    LoopFailed,
    Lost,
    Output,
    Refused,
    Started,
)
from scripts import Script

HOSTS = {0: Host("a", 1), 1: Host("b", 1), 2: Host("localhost", 1, is_here=True)}
OTHERS = [Exited(1, 0), Exited(2, 0)]


def _collect(*events, hosts=HOSTS):
    script, logged, shown = Script(*events), [], []
    collector = ReplyCollector(hosts, shown.append, logged.append)
    return collector.run(script, "looking", 60, clock=lambda: script.now), logged, shown


def test_every_host_replies_with_its_own_lines():
    outputs = [Output(1, "stdout", b"x\ny"), Output(0, "stdout", b"\xff\n"), Output(1, "stdout", b"z\n")]
    replies, _, shown = _collect(*outputs, Started(0, 7), Exited(0, 0), *OTHERS)
    assert replies == {"a": Reply(("\\xff",)), "b": Reply(("x", "yz")), "localhost": Reply()}
    assert shown == outputs


def test_a_failure_is_one_host_s_alone():
    failed = Output(0, "stderr", b"Traceback ...\nKeyError: 3\n"), Exited(0, 1)
    replies, *_ = _collect(*failed, Output(1, "stdout", b"x\n"), *OTHERS)
    assert replies["a"] == Reply(trouble="KeyError: 3 (exit code 1)")
    assert replies["b"] == Reply(("x",))


def test_a_program_that_crashes_without_a_word_is_told_by_what_it_did():
    replies, *_ = _collect(Exited(0, -11), *OTHERS)
    assert replies["a"] == Reply(trouble="looking failed, and wrote nothing to stderr (exit code 139)")


@pytest.mark.parametrize(
    ("event", "host"),
    [
        (Lost("b", "it is down"), "b"),
        (Refused("it is down", 1, host="b"), "b"),
        (Refused("it is down", 1), "localhost"),
    ],
)
def test_a_host_that_cannot_is_told(event, host):
    replies, *_ = _collect(event, *[Exited(rank, 0) for rank in HOSTS if HOSTS[rank].label != host])
    assert {label: reply.trouble for label, reply in replies.items() if reply.trouble} == {host: "it is down"}


def test_where_no_host_is_heard_any_more_it_ends():
    with pytest.raises(LauncherError, match="connections to its agents failed: out of memory"):
        _collect(Exited(0, 0), LoopFailed("out of memory"))


def test_a_host_that_ends_after_it_was_lost_stays_as_it_was():
    replies, *_ = _collect(Exited(0, 0), Lost("a", "it is down"), *OTHERS)
    assert replies["a"] == Reply()


def test_what_takes_too_long_is_given_up():
    replies, *_ = _collect(Output(1, "stdout", b"x\n"), Exited(0, 0), Exited(2, 0))
    assert replies["b"] == Reply(("x",), "looking took more than 60 s; --start-timeout allows more time")


def test_what_ssh_says_is_for_the_curious():
    *_, logged, _ = _collect(AgentSaid("a", "Welcome!\n"), Exited(0, 0), *OTHERS)
    assert logged == ["a: Welcome!"]


def test_a_signal_ends_it():
    with pytest.raises(SignalledError) as caught:
        _collect(Interrupted(signal.SIGINT))
    assert (caught.value.exit_code, str(caught.value)) == (130, "SIGINT before the check was done")


def test_of_an_answer_without_end_no_more_is_kept_than_an_answer_has():
    flood = [Output(0, "stdout", b"x" * 300_000)] * 10
    replies, *_ = _collect(*flood, Exited(0, 0), *OTHERS)
    assert len(replies["a"].lines[0]) == 1 << 20
