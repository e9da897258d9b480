"""What a job on many hosts costs hvdlite-run: `python tests/bench/many_hosts.py 2 16 64 128 1000` prints a table.

    hvdlite-run ── a shell in the place of ssh, two pipes ──► this process, which speaks for all agents

Each host has one worker, which does nothing. hvdlite-run has the limit of open files that this was started with. The
processor time is the launcher's own, without its children's, from its start until all workers have started (``start``),
and while nothing happens (``idle``, of one core).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from hvdlite_launcher.protocol.channel import MARK, encode
from hvdlite_launcher.protocol.messages import Beat, Exited, Hello, Message, Started
from hvdlite_launcher.system.process_tree import allow_open_files, as_before
from hvdlite_launcher.version import VERSION

_HEADER = struct.Struct(">BII")  # of a frame: its kind, a number, and the length of what follows
_KIND_OF_GREET, _KIND_OF_START = 19, 16  # see `protocol.channel`
_BEAT_S = 2.0
_IDLE_S = 6.0
_PATIENCE_S = 300.0

# In the place of ssh, which is called with a host and a command: the host's pipes lead to this process.
_REACH = """#!/bin/sh
exec 3<&0
cat <&3 >"$0.$1.commands" 3<&- &
exec cat "$0.$1.events" 3<&-
"""


@dataclass(frozen=True)
class Cost:
    """What hvdlite-run used with so many hosts; memory in bytes, processor time and time in seconds.

    ``idle`` is the processor time per second while nothing happens.
    """

    hosts: int
    start_s: float
    start_cpu_s: float
    idle: float
    memory: int
    threads: int
    open_files: int


class _Agent:
    """Speaks for the agent of one host: greets, tells that its worker has started, and when that ends."""

    def __init__(self, number: int, reach: Path, selector: selectors.BaseSelector) -> None:
        self.number = number  # and its worker's
        self._selector = selector
        self._received = bytearray()
        self.is_greeted = self.has_started = False
        self.is_open = True
        commands, events = (f"{reach}.{label(number)}.{what}" for what in ("commands", "events"))
        for path in (commands, events):
            os.mkfifo(path)
        self._commands = os.open(commands, os.O_RDONLY | os.O_NONBLOCK)
        self._events = os.open(events, os.O_RDWR | os.O_NONBLOCK)
        selector.register(self._commands, selectors.EVENT_READ, self.read)

    def read(self) -> None:
        data = os.read(self._commands, 1 << 16)
        self._received += data
        # Looks at the kinds of frames alone: to decode them takes long for all hosts, which real ones do at a time.
        while len(self._received) >= _HEADER.size:
            kind, _, length = _HEADER.unpack_from(self._received)
            if len(self._received) < _HEADER.size + length:
                break
            del self._received[: _HEADER.size + length]
            self._react(kind)
        if not data:
            self.close()

    def _react(self, kind: int) -> None:
        if kind == _KIND_OF_GREET:
            self.is_greeted = True
            os.write(self._events, MARK)
            self.send(Hello(VERSION, 1, label(self.number), 4000, f"machine {self.number}"))
        elif kind == _KIND_OF_START:
            self.has_started = True
            self.send(Started(self.number, 1000))

    def send(self, message: Message) -> None:
        if self.is_open:
            os.write(self._events, encode(message))

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._commands)
            os.close(self._commands)
            os.close(self._events)


def label(number: int) -> str:
    """Returns the name of a host: an address, which needs no server of names to be known as another machine."""
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"


def cost(hosts: int, idle_s: float = _IDLE_S) -> Cost:
    """Runs a job on so many hosts, and returns what it cost the launcher."""
    allow_open_files(2 * hosts)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        selector = stack.enter_context(selectors.DefaultSelector())
        reach, hostfile = directory / "reach", directory / "hosts"
        reach.write_text(_REACH)
        reach.chmod(0o700)
        hostfile.write_text("".join(f"{label(number)} slots=1\n" for number in range(hosts)))
        agents = [_Agent(number, reach, selector) for number in range(hosts)]
        for agent in agents:
            stack.callback(agent.close)
        words = ["--hostfile", str(hostfile), "--ssh-program", str(reach), "--start-timeout", str(_PATIENCE_S), "true"]
        begun = time.monotonic()
        command = as_before([sys.executable, "-m", "hvdlite_launcher", *words])
        run = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        stack.callback(run.wait)
        stack.callback(run.kill)
        launcher = psutil.Process(run.pid)
        serve = partial(_serve, selector, agents)
        serve(lambda: all(agent.has_started for agent in agents))
        start_s, start_cpu_s = time.monotonic() - begun, _cpu_s(launcher)
        serve(partial(_is_over, time.monotonic() + idle_s))
        idle = (_cpu_s(launcher) - start_cpu_s) / idle_s
        memory, threads, files = launcher.memory_info().rss, launcher.num_threads(), launcher.num_fds()
        for agent in agents:
            agent.send(Exited(agent.number, 0))
        serve(lambda: not any(agent.is_open for agent in agents))
        assert run.wait() == 0, f"hvdlite-run ended with exit code {run.returncode}"
    return Cost(hosts, start_s, start_cpu_s, idle, memory, threads, files)


def _serve(selector: selectors.BaseSelector, agents: list[_Agent], until: Callable[[], bool]) -> None:
    """Speaks for the agents until this is so, with a beat of each in time."""
    give_up_at, beat_at = time.monotonic() + _PATIENCE_S, 0.0
    while not until():
        assert time.monotonic() < give_up_at, "hvdlite-run did not do in time what it should"
        for key, _ in selector.select(0.1):
            key.data()
        if time.monotonic() >= beat_at:
            beat_at = time.monotonic() + _BEAT_S
            for agent in agents:
                if agent.is_greeted:
                    agent.send(Beat())


def _is_over(end: float) -> bool:
    return time.monotonic() >= end


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", type=int, nargs="*", default=[2, 16, 64, 128])
    print("hosts  start s  CPU s: start   idle %    MB  threads  open files")
    for hosts in parser.parse_args().hosts:
        each = cost(hosts)
        print(
            f"{hosts:5}  {each.start_s:7.2f}  {each.start_cpu_s:12.2f}  {100 * each.idle:7.2f}  "
            f"{each.memory / 1e6:4.0f}  {each.threads:7}  {each.open_files:10}",
            flush=True,
        )


if __name__ == "__main__":
    main()
