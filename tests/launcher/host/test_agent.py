"""What the agent keeps of the workers that it has started."""

from __future__ import annotations

import os
import subprocess

import pytest
from hvdlite_launcher.host.agent import Agent
from hvdlite_launcher.host.start_workers import Worker
from hvdlite_launcher.system import process_tree
from hvdlite_launcher.wire.messages import Exited, InitDone, PeakMemory
from pidfds import has_pidfds_of_threads


@pytest.fixture
def make_agent():
    """Provides ``make_agent(adopts)``: an agent that no launcher talks to."""
    fds: list[int] = []

    def make(adopts: bool) -> Agent:
        fds.extend(fd for _ in range(3) for fd in os.pipe())
        return Agent(*fds[::2], adopts=adopts, report_directory=lambda _: None)

    yield make
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("adopts", [True, False])
def test_the_groups_of_workers_that_have_gone_are_forgotten(make_agent, adopts):
    agent = make_agent(adopts)
    living = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        agent._watch(Worker(0, living, {}))
        for number in range(1, 4):
            ended = subprocess.Popen(["true"], start_new_session=True)
            agent._watch(Worker(number, ended, {}))
            ended.wait()
        agent._watch(Worker(4, living, {}))
        # Where orphans are adopted, all processes are found as descendants.
        assert agent._groups == ([] if adopts else [living.pid, living.pid])
    finally:
        living.kill()
        living.wait()


@pytest.mark.parametrize("after", [0, None], ids=["in an elastic job", "in another"])
def test_in_an_elastic_job_the_end_of_a_killed_worker_is_told_before_it_is_reaped(
    make_agent, tmp_path, monkeypatch, after
):
    agent, sent = make_agent(adopts=True), []
    agent._channel.send = sent.append
    agent._job_dir = str(tmp_path)
    process = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.PIPE)
    agent._watch(Worker(5, process, {"stdout": process.stdout}))
    agent._send_of_worker(InitDone(5, after))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    while agent._selector.get_map():  # the pipe, and the pidfds of threads
        for key, _ in agent._selector.select():
            key.data()
    told_early = [Exited(5, -9)] if after == 0 and has_pidfds_of_threads() else []
    assert sent[1:] == told_early
    reaped = process_tree.Reaped(process.pid, process.wait(), 700)
    monkeypatch.setattr(process_tree, "reap", lambda: ([reaped], False))
    monkeypatch.setattr(os, "read", lambda *_: b"")
    agent._read_signals()
    assert sent[1:] == ([*told_early, PeakMemory(5, 700)] if told_early else [Exited(5, -9, peak_memory=700)])
    assert not agent._selector.get_map()
