"""What the agent keeps of the workers that it has started."""

from __future__ import annotations

import os
import subprocess

import pytest
from hvdlite_launcher.host.agent import Agent
from hvdlite_launcher.host.start_workers import Worker


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
