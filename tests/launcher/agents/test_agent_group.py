"""The agents of an elastic job, whose hosts are connected to and left while it runs."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from hvdlite_launcher.agents.agent_group import Agents
from hvdlite_launcher.errors import LauncherError


@pytest.mark.parametrize("fails", [False, True], ids=["is found", "is not found"])
@pytest.mark.parametrize("leave", [lambda agents: agents.leave("far"), Agents.end], ids=["left", "ended"])
def test_a_host_that_is_left_before_it_could_be_connected_to_is_not_connected_to(monkeypatch, leave, fails):
    is_looking, is_left = threading.Event(), threading.Event()
    added = []

    def look_up(agents, hosts):
        is_looking.set()
        assert is_left.wait(60)
        if fails:
            raise LauncherError("no such host")
        return [["ssh", "far"]]

    monkeypatch.setattr(Agents, "_argvs", look_up)
    monkeypatch.setattr(Agents, "_add", lambda agents, host, argv, **_: added.append(host))
    monkeypatch.setattr(Agents, "_greet", lambda agents, agent: None)
    events = SimpleQueue()
    agents = Agents(SimpleNamespace(hosts=()), events)
    agents.connect_later("far", 1)
    assert is_looking.wait(60)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "connect far"]
    leave(agents)
    is_left.set()
    thread.join(60)
    assert not added
    assert events.empty()
