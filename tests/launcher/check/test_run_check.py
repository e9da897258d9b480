"""The round trips that hosts report, put together; and the flags that --check refuses."""

import json
import re
from dataclasses import asdict

import pytest
from hvdlite_launcher.check.host_facts import Facts
from hvdlite_launcher.check.run_check import Reply, round_trips_in
from hvdlite_launcher.cli import hvdlite_run


def _said(*words, trouble=None):
    return Reply(tuple(json.dumps(word) for word in words), trouble)


def _trips(*replies):
    trips = round_trips_in(dict(zip("abc", replies, strict=False)))
    return trips.times_us, trips.troubles


def test_of_two_measurements_the_first_one_s_counts():
    assert _trips(_said({"peer": 1, "us": 10.0}), _said({"peer": 0, "us": 12})) == ({("a", "b"): 10.0}, {})
    assert _trips(_said(), _said({"peer": 0, "us": 12})) == ({("a", "b"): 12.0}, {})


def test_a_failure_of_either_counts_more_than_the_other_s_measurement():
    assert _trips(_said({"peer": 1, "us": 10}), _said({"peer": 0, "error": "cut"})) == ({}, {("a", "b"): "cut"})


def test_a_host_that_cannot_connect_to_another_is_named_with_the_direction():
    replies = {"a": _said({"peer": 1, "us": 10.0}), "b": _said({"peer": 0, "blocked": "no route to host"})}
    trips = round_trips_in(replies)
    assert (trips.times_us, trips.troubles, trips.blocked) == (
        {},
        {},
        {("b", "a"): "no route to host"},
    )


def test_a_host_that_says_nothing_is_in_trouble_with_all():
    well = _said({"peer": 2, "us": 10})
    times, troubles = _trips(well, _said(trouble="it is down"), _said({"peer": 0, "us": 10}))
    assert times == {("a", "c"): 10.0}
    assert troubles == {("a", "b"): "it is down", ("b", "c"): "it is down"}


NESTED, HUGE = "[" * 100_000, '{"peer": 1, "us": 1%s}' % ("0" * 400)


@pytest.mark.parametrize(
    "line", ["", "[]", "3", '{"peer": 9, "us": 1}', '{"peer": 1}', '{"peer": "x", "us": 1}', "{", NESTED, HUGE]
)
def test_lines_of_others_are_passed_over(line):
    assert _trips(Reply((line, '{"peer": 1, "us": 10}')), _said()) == ({("a", "b"): 10.0}, {})


def test_it_runs_no_command(capsys):
    assert hvdlite_run.main(["--check", "true", "x"]) == 2
    assert capsys.readouterr() == ("", "hvdlite-run: --check runs no command: leave out 'true', and what follows it\n")


def test_hosts_that_a_script_finds_are_checked_as_they_are_now(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("hvdlite_launcher.check.run_check.check", lambda job: asked.append(job) or 0)
    script = ["--host-discovery-script", "echo localhost; echo b:2", "--slots-per-host", "4"]
    assert hvdlite_run.main(["--check", *script]) == 0
    assert [(host.label, host.slots) for host in asked[0].hosts] == [("localhost", 4), ("b", 2)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("true", 2, "--host-discovery-script true prints no host now"),
        ("exit 3", 1, "--host-discovery-script exit 3: it ended with exit code 3"),
    ],
)
def test_a_script_that_finds_no_host_is_an_error(capsys, script, code, message):
    assert hvdlite_run.main(["--check", "--host-discovery-script", script]) == code
    assert capsys.readouterr().err == f"hvdlite-run: {message}\n"


def test_no_word_of_a_host_s_makes_a_line_that_nobody_said(capsys, monkeypatch):
    odd = "3.11\nnode2  fine\x1b[2J"
    facts = Facts(odd, odd, 1, True, torch="9" * 100_000, gloo=True, interfaces=(odd,), hvdlite_error=odd)
    reply = Reply((json.dumps([*asdict(facts).values()]),))
    monkeypatch.setattr("hvdlite_launcher.check.run_check.ask_hosts", lambda *_, **__: {"localhost": reply})
    assert hvdlite_run.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "3.11 node2 fine\\x1b[2J" in out
    assert not re.search(r"^node2|\x1b", out, re.MULTILINE)
