"""The agents of an elastic job, whose hosts are connected to and left while it runs."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from hvdlite_launcher.agents import agent_group
from hvdlite_launcher.agents.agent_group import Agents
from hvdlite_launcher.agents.connection_loop import MOST_CONNECTORS
from hvdlite_launcher.errors import LauncherError
from hvdlite_launcher.plan.hosts import Host
from hvdlite_launcher.plan.worker_environment import job_dir
from hvdlite_launcher.protocol.channel import MARK, encode
from hvdlite_launcher.protocol.messages import Answered, Hello, NotThereYet
from hvdlite_launcher.version import VERSION


def job_that(looks_up):
    return SimpleNamespace(
        hosts=(), ssh=SimpleNamespace(agent_argv=looks_up), start_timeout_s=60, interface_of=lambda _: None
    )


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
    agents = Agents(job_that(look_up), events)
    agents.connect_later("far", 1)
    assert is_looking.wait(60)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "connect"]
    leave(agents)
    is_left.set()
    thread.join(60)
    assert not added
    assert events.empty()


class SlowAgent:
    """In the place of an agent whose ssh is on a file system that hangs."""

    def __init__(self, host, *_, **__):
        self.host = host
        self.done = []
        SLOW.put(self)
        assert GOES_ON.wait(60)

    def __getattr__(self, name):
        return lambda *_, **__: self.done.append(name)


SLOW: SimpleQueue = SimpleQueue()
GOES_ON = threading.Event()


@pytest.mark.parametrize("leave", [lambda agents: agents.leave("far"), Agents.end], ids=["left", "ended"])
def test_while_an_ssh_is_being_started_nobody_waits_and_if_it_is_not_wanted_any_more_it_is_ended(monkeypatch, leave):
    monkeypatch.setattr(agent_group, "RemoteAgent", SlowAgent)
    GOES_ON.clear()
    agents = Agents(job_that(lambda host, timeout_s: ["ssh"]), SimpleQueue())
    agents.connect_later("far", 1)
    agent = SLOW.get(timeout=60)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "connect"]
    left = threading.Thread(target=leave, args=(agents,), daemon=True)
    left.start()
    left.join(20)
    assert not left.is_alive()
    GOES_ON.set()
    thread.join(60)
    assert agent.done == ["discard"]
    agents.end()


def test_whatever_fails_for_some_hosts_others_are_connected_to(monkeypatch):
    def look_up(host, timeout_s):
        if host.label != "far":
            raise KeyError(host.label)
        return ["ssh"]

    GOES_ON.set()
    monkeypatch.setattr(agent_group, "RemoteAgent", SlowAgent)
    monkeypatch.setattr(agent_group, "host_of_label", Host)
    events: SimpleQueue = SimpleQueue()
    agents = Agents(job_that(look_up), events)
    hosts = [f"h{number}" for number in range(2 * MOST_CONNECTORS)]
    for label in (*hosts, "far"):
        agents.connect_later(label, 1)
    lost = [events.get(timeout=60) for _ in hosts]
    assert {(each.host, each.why) for each in lost} == {(label, f"KeyError('{label}')") for label in hosts}
    assert SLOW.get(timeout=60).host.label == "far"


@pytest.mark.parametrize("is_left", [False, True], ids=["all", "one is left"])
def test_after_the_end_no_file_is_open_any_more(tmp_path, is_left):
    (tmp_path / "said").write_bytes(MARK + encode(Hello(VERSION, 2, "10.0.0.1", 4000, "m")))
    # Something that it has started still has its pipes.
    script = f"head -c 1 >/dev/null; cat {tmp_path}/said; sleep 3 & exec cat >/dev/null"
    job = job_that(lambda host, timeout_s: ["sh", "-c", script])
    job.verbose, job.ssh.by_hand = False, lambda host: ""
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/dev/fd"))
        for _ in range(3):
            with Agents(job, SimpleQueue()) as agents:
                agents.connect([Host(f"h{number}", 1) for number in range(5)])
                if is_left:
                    agents.leave("h1")
            assert len(os.listdir("/dev/fd")) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("is_later", [False, True], ids=["at the beginning", "later"])
def test_a_host_that_is_not_there_yet_is_tried_again_until_it_answers(tmp_path, is_later):
    (tmp_path / "said").write_bytes(MARK + encode(Hello(VERSION, 2, "10.0.0.1", 4000, "m")))
    # Fails as ssh does for two times.
    script = (
        f"echo >>{tmp_path}/tries; if test $(wc -l <{tmp_path}/tries) -lt 3; then "
        "echo 'ssh: connect to host far port 22: Connection refused' >&2; exit 255; fi; "
        f"head -c 1 >/dev/null; cat {tmp_path}/said; exec cat >/dev/null"
    )
    job = job_that(lambda host, timeout_s: ["sh", "-c", script])
    job.hosts, job.verbose = (Host("far", 2),), False
    job.ssh.by_hand, job.ssh.known_hosts = lambda host: "", False
    events: SimpleQueue = SimpleQueue()
    with Agents(job, events) as agents:
        if is_later:
            agents.connect_later("far", 2)
            come = [events.get(timeout=60) for _ in range(3)]
            assert [type(each) for each in come] == [NotThereYet, NotThereYet, Answered]
        else:
            assert list(agents.connect(job.hosts)) == ["far"]
        assert [agent.host.label for agent in agents._agents] == ["far"]


@pytest.mark.parametrize("leave", [lambda agents: agents.leave("far"), Agents.end], ids=["left", "ended"])
def test_a_host_that_is_left_before_it_is_tried_again_is_not_tried_again(tmp_path, leave):
    script = f"echo >>{tmp_path}/tries; echo 'ssh: connect to host far port 22: Connection refused' >&2; exit 255"
    job = job_that(lambda host, timeout_s: ["sh", "-c", script])
    job.hosts, job.ssh.by_hand, job.ssh.known_hosts = (Host("far", 2),), lambda host: "", False
    events: SimpleQueue = SimpleQueue()
    with Agents(job, events) as agents:
        agents.connect_later("far", 2)
        assert isinstance(events.get(timeout=60), NotThereYet)
        leave(agents)
        tried = (tmp_path / "tries").read_text()
        time.sleep(2 * agent_group._FIRST_PAUSE_S)
    assert (tmp_path / "tries").read_text() == tried
    assert events.empty()


class StuckAgent:
    """In the place of a local agent that has to be killed."""

    host = Host("here", 1, is_here=True)

    def wait(self, timeout_s):
        return -9

    def exit_code(self, *, is_late):
        return None

    hang_up = close = lambda self: None


def test_a_local_agent_that_was_being_left_and_is_killed_at_the_end_is_cleaned_up_after(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(agent_group.process_tree, "kill_descendants", lambda: killed.append(1))
    agents, agent = Agents(job_that(None), SimpleQueue()), StuckAgent()
    agents._add(agent)
    directory = job_dir(agents._agents[agent], str(tmp_path))
    os.mkdir(directory)
    agents.leave("here")
    agents.end()
    assert killed == [1]
    assert not os.path.exists(directory)
