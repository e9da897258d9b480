"""A killed worker is noticed once all of its threads are exiting, and what ends in another way is not."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hvdlite_launcher.host.worker_processes import KilledWorkers, killed_by
from no_files import no_files_left
from pidfds import has_pidfds_of_threads

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux")

# Waits with 6 threads; each line on stdin has the oldest of them end, and "exit" the process.
PROGRAM = """
import os, sys, threading
waits = [threading.Event() for _ in range(6)]
threads = [threading.Thread(target=each.wait, daemon=True) for each in waits]
for thread in threads:
    thread.start()
print("ready", flush=True)
for line in sys.stdin:
    if line == "exit\\n":
        os._exit(3)
    if line == "exec\\n":
        os.execv(sys.executable, [sys.executable, "-c", "print('ready', flush=True); input()"])
    waits.pop(0).set()
    threads.pop(0).join()
    print("ended", flush=True)
"""


class Watched:
    """A process with threads, watched in an event loop of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.says() == "ready"
        self.told: list[tuple[int, int]] = []
        self.selector = selectors.DefaultSelector()
        self.workers = KilledWorkers(self.selector, lambda pid, signum: self.told.append((pid, signum)))
        self.workers.watch(self.process.pid)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def turn(self, within_s: float | None) -> None:
        """Runs the event loop once."""
        for key, _ in self.selector.select(within_s if within_s == 0 else self.workers.time_left_s()):
            key.data()
        self.workers.tick()

    def until_it_looks_no_longer(self) -> None:
        while self.workers.time_left_s() is not None:
            self.turn(None)

    def until_told(self) -> None:
        while not self.told:
            self.turn(None)


@pytest.fixture
def watched():
    watched = Watched()
    yield watched
    watched.process.kill()
    watched.process.communicate()
    watched.workers.forget(watched.process.pid)
    assert not watched.selector.get_map()
    watched.selector.close()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_process_is_told_once_with_its_signal_and_before_it_is_reaped(watched, signum):
    watched.process.send_signal(signum)
    if not has_pidfds_of_threads():
        os.waitid(os.P_PID, watched.process.pid, os.WEXITED | os.WNOWAIT)
        watched.turn(0)
        assert watched.told == []
        return
    watched.until_told()
    assert watched.told == [(watched.process.pid, signum)]
    assert not watched.selector.get_map()
    assert watched.process.wait() == -signum
    watched.turn(0)
    assert len(watched.told) == 1


def test_threads_that_end_by_themselves_are_no_end_of_the_process(watched):
    for _ in range(6):
        watched.say("end a thread")
        assert watched.says() == "ended"
    while len(watched.selector.get_map()) > 1:  # but for the first thread
        watched.turn(None)
    watched.until_it_looks_no_longer()
    assert watched.told == []
    assert watched.process.poll() is None


def test_a_process_that_exits_by_itself_is_left_to_be_reaped(watched):
    watched.say("exit")
    os.waitid(os.P_PID, watched.process.pid, os.WEXITED | os.WNOWAIT)
    while watched.selector.get_map():
        watched.turn(None)
    watched.until_it_looks_no_longer()
    assert watched.told == []
    assert watched.process.wait() == 3


def test_a_program_that_another_takes_the_place_of_is_not_killed(watched):
    watched.say("exec")
    assert watched.says() == "ready"  # by then the kernel has ended all other threads
    while len(watched.selector.get_map()) > 1:
        watched.turn(None)
    watched.until_it_looks_no_longer()
    assert watched.told == []
    assert watched.process.poll() is None
    assert killed_by(watched.process.pid) is None


def test_a_process_is_killed_only_when_no_thread_goes_on():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert killed_by(process.pid) is None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert killed_by(process.pid) == signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    assert killed_by(process.pid) is None


def test_without_pidfds_of_threads_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(syscall=lambda *_: -1))
    with selectors.DefaultSelector() as selector:
        workers = KilledWorkers(selector, lambda *_: pytest.fail("nothing is watched"))
        workers.watch(os.getpid())
        assert not selector.get_map()
        assert workers.time_left_s() is None
        workers.forget(os.getpid())


def test_nothing_is_known_of_a_process_while_this_one_can_open_no_more_files(monkeypatch):
    with no_files_left():
        assert killed_by(os.getpid()) is None
    # As if the last file had gone after the threads were listed.
    monkeypatch.setattr(os, "listdir", lambda _: [str(os.getpid())])
    with no_files_left():
        assert killed_by(os.getpid()) is None
