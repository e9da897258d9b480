"""Which hosts a script prints, when that is an event, and what is said of a script that fails."""

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from hvdlite_launcher.elastic import discovery
from hvdlite_launcher.elastic.discovery import Discovery, ScriptError, parse_discovered, run_script
from hvdlite_launcher.plan.job_spec import DiscoveryScript
from hvdlite_launcher.protocol.messages import DiscoveryFailed, HostsFound
from hvdlite_launcher.system import process_tree

LIMIT_S = 60


def hosts(text: str, slots_per_host: int = 1) -> dict[str, int]:
    return {host.label: host.slots for host in parse_discovered(text, slots_per_host)}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a:2\nb:4\n", {"a": 2, "b": 4}),
        ("b:4\na:2", {"b": 4, "a": 2}),
        ("a\nb:2\n", {"a": 8, "b": 2}),
        ("\n  a:2  # spot\r\n# none\n", {"a": 2}),
        ("a:2\na:2\n", {"a": 2}),
        ("user@a\n[fd00::1]:2\n[fd00::2]\n", {"user@a": 8, "fd00::1": 2, "fd00::2": 8}),
        ("", {}),
    ],
)
def test_a_line_is_a_host_with_its_slots_or_those_of_all_hosts(text, found):
    assert hosts(text, slots_per_host=8) == found
    assert list(hosts(text, slots_per_host=8)) == list(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:2\nb:many\n", "line 2 of its output: 'b:many' is not host:slots, such as node1:4"),
        ("a:0", "line 1 of its output: 'a:0' has 0 slots"),
        ("a:auto", "line 1 of its output: 'a:auto': say how many slots, such as node1:4"),
        ("-oProxyCommand=x", "line 1 of its output: '-oProxyCommand=x' is not host:slots"),
        ("Error from server: no pods found", "line 1 of its output: 'Error from server: no pods found' is not"),
        ("a:2\n\na:4", "line 3 of its output: a has 4 slots, and in line 1 2; name each host once"),
    ],
)
def test_a_line_that_is_no_host_is_named(text, message):
    with pytest.raises(ScriptError) as error:
        parse_discovered(text, 1)
    assert str(error.value).startswith(message)
    assert str(error.value).isprintable()


def script(command: str, tmp_path, **limits) -> DiscoveryScript:
    return DiscoveryScript(command, str(tmp_path), **limits)


def run(command: str, tmp_path, *, is_closed=lambda: False, **limits) -> bytes:
    return run_script(script(command, tmp_path, **limits), is_closed)


def test_a_script_runs_where_the_user_was_and_a_process_that_it_leaves_is_ended(tmp_path):
    (tmp_path / "hosts").write_text("a:2\n")
    assert run("sleep 1000 & echo $! >pid; cat hosts", tmp_path) == b"a:2\n"
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_script_has_the_limit_of_open_files_that_the_launcher_was_started_with(tmp_path, monkeypatch):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(process_tree, "_AT_START", (123, hard))
    assert run("ulimit -S -n", tmp_path) == b"123\n"


def test_a_script_needs_no_room_on_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    assert run("echo a:2", tmp_path) == b"a:2\n"


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended but is not yet reaped does not."""
    give_up_at = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_at:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo no access >&2; exit 3", "it ended with exit code 3: no access"),
        ("exit 3", "it ended with exit code 3"),
        ("/no/such/script", "it was not found: "),
        ("./plain", "it cannot be executed: "),
        ("kill -9 $$", "it was killed by SIGKILL"),
        ("yes a:2", "it printed more than any list of hosts has, and was killed"),
    ],
)
def test_a_script_that_fails_is_told_by_how_and_by_its_last_words(command, message, tmp_path):
    (tmp_path / "plain").write_text("a:2\n")
    with pytest.raises(ScriptError) as error:
        run(command, tmp_path)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("command", ["sleep 1000 & echo $! >pid; wait", "exec >&- 2>&-; echo $$ >pid; exec sleep 1000"])
def test_a_script_that_hangs_is_killed_with_all_that_it_started(command, tmp_path, monkeypatch):
    pid, now_s = tmp_path / "pid", [0.0]

    def clock() -> float:
        # Time passes only once the process is known that must not be left.
        now_s[0] += pid.exists() and pid.read_text().endswith("\n")
        return now_s[0]

    monkeypatch.setattr(discovery, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with pytest.raises(ScriptError, match=r"^it ran for 0.5 s, and was killed$"):
        run(command, tmp_path, limit_s=0.5)
    assert not is_running(int(pid.read_text()))


def test_a_process_that_adopts_orphans_keeps_none_of_a_scripts_as_a_zombie(tmp_path):
    program = """
import os, sys
from hvdlite_launcher.elastic.discovery import run_script
from hvdlite_launcher.plan.job_spec import DiscoveryScript
from hvdlite_launcher.system import process_tree
process_tree.adopt_orphans()
for _ in range(3):
    run_script(DiscoveryScript("sleep 1000 & echo a", sys.argv[1]), lambda: False)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("none")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (ended.stdout, ended.stderr) == ("none\n", "")


class Found:
    """A discovery by a file of hosts, and what it told."""

    def __init__(self, tmp_path) -> None:
        self._file = tmp_path / "hosts"
        self.events: SimpleQueue = SimpleQueue()
        self.said: SimpleQueue = SimpleQueue()
        self._runs = tmp_path / "runs"
        self._runs.write_text("")
        command = "echo >>runs; cat hosts"
        self.discovery = Discovery(script(command, tmp_path, period_s=0.01), self.events.put, self.said.put)

    def print(self, text: str | None) -> None:
        """Makes the script print this from its next run on; None: fail."""
        if text is None:
            self._file.unlink()
            return
        new = self._file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self._file)

    def wait_for_runs(self, count: int) -> None:
        """Returns when so many further runs have begun: all but the last of them have ended."""
        enough = len(self._runs.read_text()) + count
        give_up_at = time.monotonic() + LIMIT_S
        while len(self._runs.read_text()) < enough:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)

    def event(self):
        return self.events.get(timeout=LIMIT_S)


def test_hosts_are_an_event_when_they_have_changed(tmp_path):
    found = Found(tmp_path)
    found.print("a:2\nb:2\n")
    with found.discovery:
        assert found.event() == HostsFound({"a": 2, "b": 2})
        found.wait_for_runs(3)
        found.print("b:2\na:2\n")
        found.wait_for_runs(3)
        found.print("b:2\n")
        assert found.event() == HostsFound({"b": 2})
        found.print("b:4\na:2\n")
        assert found.event() == HostsFound({"b": 4, "a": 2})
    assert found.events.empty()
    assert found.said.empty()


def test_no_host_at_all_is_believed_when_it_is_said_twice(tmp_path):
    found = Found(tmp_path)
    found.print("a:2\n")
    with found.discovery:
        assert found.event() == HostsFound({"a": 2})
        found.print("")
        assert found.event() == HostsFound({})
        found.print("a:2\n")
        assert found.event() == HostsFound({"a": 2})


def test_all_names_of_this_machine_are_one_host(tmp_path):
    found = Found(tmp_path)
    found.print("localhost:2\n127.0.0.1:1\n")
    with found.discovery:
        assert found.event() == HostsFound({"localhost": 3})


def test_names_are_looked_up_when_the_hosts_change_and_not_with_each_run(tmp_path, monkeypatch):
    looked_up = []

    def find(hosts):
        looked_up.append([host.label for host in hosts])
        return hosts

    monkeypatch.setattr("hvdlite_launcher.elastic.discovery.find_this_machine", find)
    found = Found(tmp_path)
    found.print("a:2\n")
    with found.discovery:
        assert found.event() == HostsFound({"a": 2})
        found.wait_for_runs(3)
        found.print("b:2\n")
        assert found.event() == HostsFound({"b": 2})
    assert looked_up == [["a"], ["b"]]


def test_a_script_whose_first_run_fails_is_given_up(tmp_path):
    found = Found(tmp_path)
    with found.discovery:
        event = found.event()
    assert isinstance(event, DiscoveryFailed)
    assert event.why.startswith("--host-discovery-script echo >>runs; cat hosts: it ended with exit code 1: cat: ")
    assert found.events.empty()


def test_a_later_run_that_fails_is_told_once_and_changes_no_host(tmp_path):
    found = Found(tmp_path)
    found.print("a:2\n")
    with found.discovery:
        assert found.event() == HostsFound({"a": 2})
        found.print(None)
        assert "it ended with exit code 1: cat: " in found.said.get(timeout=LIMIT_S)
        found.wait_for_runs(3)
        assert found.said.empty()
        found.print("a:2\n")
        assert found.said.get(timeout=LIMIT_S).endswith(" works again")
        found.print("what?\n")
        assert "line 1 of its output: 'what?' is not host:slots" in found.said.get(timeout=LIMIT_S)
        found.print("a:2\nb:2\n")
        assert found.event() == HostsFound({"a": 2, "b": 2})


def test_the_end_of_a_job_does_not_wait_for_a_name_server(tmp_path, monkeypatch):
    asked, answers = threading.Event(), threading.Event()

    def find(hosts):
        asked.set()
        answers.wait(LIMIT_S)
        return hosts

    monkeypatch.setattr(discovery, "find_this_machine", find)
    monkeypatch.setattr(discovery, "_END_S", 0.01)
    found = Found(tmp_path)
    found.print("a:2\n")
    with found.discovery:
        assert asked.wait(LIMIT_S)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "discovery"]
    answers.set()
    thread.join(LIMIT_S)
    assert found.events.empty()


def test_a_discovery_that_is_closed_ends_its_script_and_its_thread(tmp_path):
    events: SimpleQueue = SimpleQueue()
    hanging = Discovery(script("echo $$ >pid.new; mv pid.new pid; sleep 1000", tmp_path), events.put, events.put)
    with hanging:
        give_up_at = time.monotonic() + LIMIT_S
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert events.empty()
    assert "discovery" not in {thread.name for thread in threading.enumerate()}
