"""Waiting for the agents of all hosts to answer, tested with scripted events."""

import signal

import pytest
from hvdlite_launcher.agents.wait_for_agents import wait_for_agents
from hvdlite_launcher.errors import LauncherError
from hvdlite_launcher.protocol.messages import AgentSaid, Answered, Hello, Interrupted, LoopFailed, Lost, NotThereYet
from scripts import Script

HELLO = Hello("1", None, "10.0.0.1", 4000)


def _gather(hosts, *events):
    script, said, logged = Script(*events), [], []
    try:
        by_hand = {host: f"ssh {host} true" for host in hosts}
        greeted = wait_for_agents(
            by_hand,
            script,
            timeout_s=60,
            say=said.append,
            log=logged.append,
            clock=lambda: script.now,
        )
        hellos = greeted.all()
    except LauncherError as error:
        return error, said, logged
    return hellos, said, logged


def test_all_answers_are_given_by_host():
    answers, said, _ = _gather(["a", "b"], Answered("b", HELLO), Answered("a", HELLO))
    assert (answers, said) == ({"a": HELLO, "b": HELLO}, [])


def test_where_no_agent_is_heard_any_more_it_ends():
    error, said, _ = _gather(["a", "b"], Answered("b", HELLO), LoopFailed("out of memory"))
    assert (str(error), said) == ("the launcher's connections to its agents failed: out of memory", [])


def test_each_failure_is_told_at_once_and_all_are_named_at_the_end():
    events = Lost("b", "no key"), Answered("a", HELLO), Lost("c", "no name")
    error, said, _ = _gather(["a", "b", "c"], *events)
    assert said == ["b: no key", "c: no name"]
    assert str(error) == "no worker was started, because these hosts failed: b, c; a answered"
    assert error.exit_code == 1


def test_a_host_that_is_silent_for_too_long_is_named():
    error, said, _ = _gather(["a", "b"], Answered("a", HELLO))
    assert said == ["b: no answer within 60 s: try ssh b true, or allow more time with --start-timeout"]
    assert "failed: b; a answered" in str(error)


def test_of_a_single_host_the_failure_is_all_that_is_said():
    error, said, _ = _gather(["a"], Lost("a", "no key"))
    assert (str(error), said) == ("a: no key", [])


def test_what_ssh_says_meanwhile_is_for_the_curious():
    _, said, logged = _gather(["a"], AgentSaid("a", "Welcome!\n"), Answered("a", HELLO))
    assert said == []
    assert logged[0] == "a: Welcome!"


def test_a_signal_ends_it_with_the_signals_exit_code():
    error, _, _ = _gather(["a"], Interrupted(signal.SIGINT))
    assert error.exit_code == 130


def test_a_host_that_is_lost_after_its_answer_and_before_the_others_has_failed():
    error, said, _ = _gather(["a", "b"], Answered("a", HELLO), Lost("a", "killed"), Answered("b", HELLO))
    assert said == ["a: killed"]
    assert str(error) == "no worker was started, because these hosts failed: a; b answered"


REFUSED = NotThereYet("b", "connection refused", "ssh: Connection refused (is sshd running there?)")
WAITING = "waiting for b: connection refused; trying again until 60 s are over (--start-timeout)"


def test_a_host_that_is_not_there_yet_is_told_once_and_waited_for():
    answers, said, _ = _gather(["a", "b"], REFUSED, Answered("a", HELLO), REFUSED, REFUSED, Answered("b", HELLO))
    assert (answers.keys(), said) == ({"a", "b"}, [WAITING])


def test_a_host_that_is_still_not_there_when_the_time_is_over_is_named_with_cause_and_way_out():
    error, said, _ = _gather(["a", "b"], REFUSED, Answered("a", HELLO))
    why = (
        "b: ssh: Connection refused (is sshd running there?). It was tried again for 60 s; --start-timeout allows more"
    )
    assert said == [WAITING, why]
    assert "failed: b; a answered" in str(error)


@pytest.mark.parametrize("events", [(REFUSED, Lost("a", "no key")), (Lost("a", "no key"), REFUSED)])
def test_nobody_waits_for_hosts_that_are_not_there_when_another_has_failed(events):
    error, said, _ = _gather(["a", "b"], *events)
    assert sorted(said)[:2] == ["a: no key", "b: ssh: Connection refused (is sshd running there?)"]
    assert "these hosts failed:" in str(error)


def test_a_host_that_comes_and_then_fails_has_failed():
    error, said, _ = _gather(["b"], REFUSED, Lost("b", "no key"))
    assert (str(error), said) == ("b: no key", [WAITING])
