"""Elastic training jobs that are broken at named points, as a seed says, end with the model that their commits imply.

`elastic_scenarios` makes the scenarios, `elastic_program` trains, and `elastic_ledger` computes in one process what
must have come out. There are a hundred with TEST_HVDLITE_LONG=1, and else a few of each sort.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import elastic_ledger
import elastic_program
import psutil
import pytest
from e2e.conftest import Launch, assert_clean, wait_until
from e2e.machines import kill_all
from e2e.ssh_hosts import Host, Lan
from elastic_scenarios import ONE_HOST_KINDS, SEVERAL_HOSTS_KINDS, Event, Scenario, on_one_host, on_several_hosts
from long_run import IS_LONG, chosen

pytestmark = pytest.mark.slow

LIMIT_S = 400  # only a job that hangs takes longer: most take 20 s on two idle cores

ON_ONE_HOST = range(70)
ON_SEVERAL_HOSTS = range(30)


class Trial:
    """One job, and what its scenario does to it from outside."""

    def __init__(self, scenario: Scenario, tmp: Path, labels: Sequence[str], lan: Lan | None) -> None:
        self.scenario = scenario
        self.directory = tmp / "job"
        self.directory.mkdir()
        self._labels = labels
        self._lan = lan
        self._stderr = tmp / "stderr"
        self.write_hosts(scenario.hosts)
        script = self.directory / "discover"
        # The files turn.0, turn.1, ... are what it prints first; an empty one makes it fail.
        script.write_text(
            f"#!/bin/sh\ncd {self.directory}\nset -- turn.*\n"
            '[ -e "$1" ] || exec cat hosts\ncat "$1"; [ -s "$1" ]; code=$?; rm "$1"; exit $code\n'
        )
        script.chmod(0o755)
        (self.directory / "scenario").write_text(json.dumps(scenario.to_json()))
        self.command = [
            *scenario.flags, "-np", str(scenario.ranks), "--host-discovery-script", str(script),
            sys.executable, elastic_program.__file__, str(self.directory / "scenario"), str(self.directory),
        ]  # fmt: skip

    def run(self, launch: Callable[..., Launch]) -> tuple[int, str, float]:
        """Returns the exit code, stderr and how long it took."""
        began_s = time.monotonic()
        on = None if self._lan is None else self._lan.desk
        with self._stderr.open("wb") as stderr:
            self.job = launch(*self.command, env=self.scenario.env, on=on, stderr=stderr)
        hangs = threading.Timer(LIMIT_S, self._kill)
        hangs.start()
        try:
            assert self.job.process.stdout is not None
            for line in self.job.process.stdout:
                if match := re.fullmatch(rb"\[0\]<stdout>:event (\d+)\n", line):
                    self._do(self.scenario.events[int(match[1])])
            code = self.job.process.wait()
        finally:
            hangs.cancel()
        return code, self.stderr(), time.monotonic() - began_s

    def stderr(self) -> str:
        return self._stderr.read_text(errors="backslashreplace")

    def _kill(self) -> None:
        with self._stderr.open("a") as stderr:
            stderr.write(f"\nTHE TEST HAS KILLED IT after {LIMIT_S} s\n")
        for process in self.job.processes():
            process.kill()

    # ------------------------------------------------------------------ events

    def _do(self, event: Event) -> None:
        done = self.directory / f"done.{event.id}"
        if not done.exists():
            getattr(self, event.do)(event)
            done.touch()

    def hosts_become(self, event: Event) -> None:
        self.write_hosts(event.hosts)

    def discovery_flaps(self, event: Event) -> None:
        hosts = (self.directory / "hosts").read_text()
        self._take_turns([self._lines(event.hosts), hosts] * 2)

    def discovery_fails(self, _: Event) -> None:
        self._take_turns([""] * 3)

    def link_is_cut(self, event: Event) -> None:
        lan, host = self._where(event)
        lan.cut(host)

    def link_is_cut_for_a_while(self, event: Event) -> None:
        lan, host = self._where(event)
        lan.cut(host)
        # The launcher may end before: then the test sees that.
        wait_until(lambda: f"lost {host.spec}: " in self.stderr() or self.job.process.poll() is not None)
        lan.restore(host)

    def kill_all_on_a_host(self, event: Event) -> None:
        host = self._where(event)[1]
        left = host.leftovers()
        kill_all(host.processes())
        # The agent's parent, which would remove the job's directory, has mostly been killed before it could.
        for path in left:
            shutil.rmtree(path, ignore_errors=True)

    def kill_an_agent(self, event: Event) -> None:
        found = _matching(self._where(event)[1].processes(), r"-m hvdlite_launcher\.host\.(agent|remote_parent)$")
        # Its parent, which would end it, is older.
        max(found, key=lambda process: process.create_time()).kill()

    def kill_an_ssh_client(self, event: Event) -> None:
        lan, host = self._where(event)
        kill_all(_matching(lan.desk.processes(), rf"^ssh .*{re.escape(host.address)} .*hvdlite_launcher"))

    def power_off(self, event: Event) -> None:
        lan, host = self._where(event)
        lan.machines.remove(host)
        host.close()

    def write_hosts(self, slots: Sequence[int]) -> None:
        new = self.directory / "new"
        new.write_text(self._lines(slots))
        new.rename(self.directory / "hosts")

    def _lines(self, slots: Sequence[int]) -> str:
        return "".join(f"{label}:{each}\n" for label, each in zip(self._labels, slots, strict=True) if each)

    def _take_turns(self, turns: Sequence[str]) -> None:
        names = [self.directory / f"turn.{number}" for number in range(len(turns))]
        for path, text in reversed(list(zip(names, turns, strict=True))):
            (self.directory / "new").write_text(text)
            (self.directory / "new").rename(path)
        wait_until(lambda: not any(path.exists() for path in names) or self.job.process.poll() is not None)

    def _where(self, event: Event) -> tuple[Lan, Host]:
        assert self._lan is not None
        return self._lan, self._lan.hosts[event.host]


def _matching(processes: Sequence[psutil.Process], pattern: str) -> list[psutil.Process]:
    """Returns those with such a command line, of which there must be some."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            if re.search(pattern, " ".join(process.cmdline())):
                found.append(process)
    assert found, f"no process is {pattern}"
    return found


def run_and_check(trial: Trial, launch: Callable[..., Launch], table: list) -> None:
    scenario = trial.scenario
    code, err, took_s = trial.run(launch)
    about = f"{scenario}\n{' '.join(trial.command)}\n{err}"
    assert code == scenario.exit_code, about
    assert scenario.says in err, about
    not_done = [each.id for each in scenario.faults if not (trial.directory / f"fired.{each.id}").exists()]
    # A job that fails may end before the last.
    assert not not_done or code, f"faults {not_done} were not done\n{about}"
    if not any(fault.how == "raises" for fault in scenario.faults):
        assert "Traceback" not in err, about
    notes = elastic_ledger.read(trial.directory)
    try:
        steps = elastic_ledger.check(scenario, notes)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{about}") from error
    table.append((scenario, took_s, len(steps), elastic_ledger.recoveries(scenario, notes)))


@pytest.mark.night(but=1)
@pytest.mark.parametrize("seed", chosen(ON_ONE_HOST, (3, 7, 8, 10, 15, 16)))
def test_a_job_on_one_host_ends_with_the_model_of_its_commits(launch, tmp_path, table, seed):
    trial = Trial(on_one_host(seed), tmp_path, ["localhost"], None)
    run_and_check(trial, launch, table)
    trial.job.assert_gone()


@pytest.mark.night(but=1)
@pytest.mark.parametrize("seed", chosen(ON_ONE_HOST, (3, 7, 8, 10)))
def test_so_it_does_where_ranks_share_the_optimizers_state(launch, tmp_path, table, seed):
    scenario = on_one_host(seed)
    scenario.shard = "world"
    trial = Trial(scenario, tmp_path, ["localhost"], None)
    run_and_check(trial, launch, table)
    trial.job.assert_gone()


def test_so_it_does_where_other_optimizers_would_finish_the_step_in_which_a_rank_is_lost(launch, tmp_path, table):
    scenario = dataclasses.replace(on_one_host(14), shard="world", says="all ranks go back to the last commit")
    scenario.flags.append("--survive")
    assert scenario.name == "one is lost"
    trial = Trial(scenario, tmp_path, ["localhost"], None)
    run_and_check(trial, launch, table)
    trial.job.assert_gone()


@pytest.mark.night(but=1)
@pytest.mark.parametrize("seed", chosen(ON_SEVERAL_HOSTS, (0, 1, 2)))
def test_a_job_over_several_hosts_ends_with_the_model_of_its_commits(make_lan, launch, tmp_path, table, seed):
    scenario = on_several_hosts(seed)
    lan = make_lan(*"bcd"[: len(scenario.hosts)])
    trial = Trial(scenario, tmp_path, [host.spec for host in lan.hosts], lan)
    run_and_check(trial, launch, table)
    for host in lan.hosts:
        if host in lan.machines:
            lan.restore(host)
    assert_clean(lan, 60)


def test_the_scenarios_have_all_kinds_and_the_same_seed_makes_the_same():
    one_host, several = (
        [on_one_host(seed) for seed in ON_ONE_HOST],
        [on_several_hosts(seed) for seed in ON_SEVERAL_HOSTS],
    )
    assert len({each.name for each in one_host}) == ONE_HOST_KINDS
    assert len({each.name.partition(" of ")[0] for each in several}) == SEVERAL_HOSTS_KINDS
    assert one_host == [on_one_host(seed) for seed in ON_ONE_HOST]
    assert len(one_host) + len(several) == 100


@pytest.fixture(scope="module")
def table(pytestconfig: pytest.Config) -> Iterator[list]:
    rows: list = []
    yield rows
    lines = [f"{took_s:6.1f} s, {steps:4} steps  {scenario}" for scenario, took_s, steps, _ in rows]
    lines += _times([each for *_, found in rows for each in found])
    if IS_LONG or os.environ.get("TEST_HVDLITE_TABLE"):
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print("", *lines, sep="\n", flush=True)


def _times(found: Sequence[elastic_ledger.Recovery]) -> list[str]:
    """A table of the seconds from a fault to the next step that is done, by how the worker ended and how many ranks."""
    lines = []
    for how, size in sorted({(each.how, each.size) for each in found}):
        these = [each for each in found if (each.how, each.size) == (how, size)]
        totals = [each.total_s for each in these]
        parts = {name: statistics.median(each.parts[name] for each in these) for name in these[0].parts}
        of = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
        lines.append(
            f"{how:8} {size} ranks, {len(these):3} times: median {statistics.median(totals):6.3f} s, "
            f"worst {max(totals):6.3f} s; medians: {of}"
        )
    return lines
