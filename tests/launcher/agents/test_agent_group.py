"""The agents of an elastic job, whose hosts are connected to and left while it runs."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from hvdlite_launcher.agents import agent_group
from hvdlite_launcher.agents.agent_group import Agents
from hvdlite_launcher.errors import LauncherError


@pytest.mark.parametrize("fails", [False, True], ids=["is found", "is not found"])
@pytest.mark.parametrize("leave", [lambda agents: agents.leave("far"), Agents.end], ids=["left", "ended"])
def test_a_host_that_is_left_before_it_could_be_connected_to_is_not_connected_to(monkeypatch, leave, fails):
    is_looking, is_left = threading.Event(), threading.Event()
    added = []

    def look_up(host, timeout_s):
        is_looking.set()
        assert is_left.wait(60)
        if fails:
            raise LauncherError("no such host")
        return ["ssh", "far"]

    monkeypatch.setattr(agent_group, "RemoteAgent", lambda host, *_, **__: added.append(host))
    events = SimpleQueue()
    job = SimpleNamespace(hosts=(), ssh=SimpleNamespace(agent_argv=look_up), start_timeout_s=60)
    agents = Agents(job, events)
    agents.connect_later("far", 1)
    assert is_looking.wait(60)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "connect"]
    leave(agents)
    is_left.set()
    thread.join(60)
    assert not added
    assert events.empty()
