"""The agent, `python -m hvdlite_launcher.host.agent`: starts one host's workers and ends all that they leave behind.

It reads commands on stdin and writes events on stdout (see `channel`), and decides nothing but this: when
its stdin ends, or says nothing for too long, the launcher is done or gone, and every process that came from here
is killed, the job's directory removed. One thread, one loop, nothing that blocks: a launcher that does not read
holds up the workers' output, but never the end of the job.

A signal does not end it: a scheduler that signals all processes of a job at once signals the launcher too, and what
the workers do until that kills them, such as writing a checkpoint, is not to be cut off here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Collection
from dataclasses import replace

from ..errors import LauncherError, ProtocolError, in_words
from ..plan.worker_environment import job_dir, left_file, peer_lost_file, store_socket
from ..store.cache import Cache
from ..store.relay import Relay
from ..system import job_directory, network, process_tree
from ..system.machine import machine_id, slots_by_hardware
from ..system.signals import signals_as_bytes
from ..version import VERSION
from ..wire.agent_frames import MARK
from ..wire.channel import SILENCE_S, Channel
from ..wire.messages import (
    Beat,
    Exited,
    Greet,
    Hello,
    Input,
    InputWanted,
    OutputTaken,
    Refused,
    SignalWorkers,
    Started,
    StartJob,
)
from ..wire.store_messages import StoreCommand
from .start_workers import CannotStartError, Worker, ranks_of, start_workers
from .worker_output import WorkerOutput
from .worker_stdin import WorkerStdin

_PIPE_BYTES = 1 << 20
_WHICH = "--network-interface says which to use"
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """The loop over three file descriptors: commands in, events out, and the signals we get, as bytes."""

    def __init__(
        self, commands: int, events: int, signals: int, *, adopts: bool, tell_directory: Callable[[str], object]
    ) -> None:
        """``adopts``: orphans among our descendants become our children, so that none is out of sight.

        ``tell_directory`` is told which directory is to be removed if this process cannot do it.
        """
        self._commands = commands
        self._signals = signals
        self._adopts = adopts
        self._tell_directory = tell_directory
        self._selector = selectors.DefaultSelector()
        self._channel = Channel(commands, events, self._selector)
        self._worker_output = WorkerOutput(self._selector, self._channel)
        self._greeting: Greet | None = None
        self._port: socket.socket | None = None  # kept from others, see `network.reserve_port`
        self._workers: dict[int, Worker] = {}  # by pid, those that run
        self._groups: list[int] = []  # of all workers ever
        self._stdins: dict[int, WorkerStdin] = {}  # by the worker's number
        self._job_dir: str | None = None
        self._held_dir: int | None = None  # by being open, until this process ends
        self._cache: Cache | None = None
        self._relay: Relay | None = None
        self._parent = os.getppid()
        self._orphaned = False

    def run(self) -> None:
        """Until the launcher hangs up, or our remote parent is gone; then kill, tidy up and return."""
        self._listen(self._commands, self._read_commands)
        self._listen(self._signals, self._read_signals)
        try:
            while not (self._orphaned or self._channel.closed):
                for key, _ in self._selector.select(self._channel.time_left_s()):
                    key.data()
                self._channel.tick()
                self._channel.flush()
                self._worker_output.hold_up()
        finally:
            self._end()
        if self._channel.silent:  # should it hear of us again: it only stood still, as after Ctrl-Z
            raise LauncherError(f"nothing was heard of the launcher for {SILENCE_S:g} s")

    def _listen(self, fd: int, react: Callable[[], object]) -> None:
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, react)

    def _end(self) -> None:
        if not self._adopts:  # the groups may hold children of the dead, which no list of descendants shows
            for group in self._groups:
                process_tree.signal_group(group, signal.SIGKILL)
        everything_ended = process_tree.kill_descendants()
        if self._relay is not None:
            self._relay.close()
        if self._job_dir is not None:
            shutil.rmtree(self._job_dir, ignore_errors=True)
        if not everything_ended:
            raise LauncherError("some processes of the job could not be killed")

    # ------------------------------------------------------- from the launcher

    def _read_commands(self) -> None:
        for message in self._channel.receive():
            match message:
                case Greet():
                    self._answer(message)
                case StartJob():
                    self._start(message)
                case SignalWorkers():
                    self._signal(message)
                case Input():
                    if stdin := self._stdins.get(message.worker):
                        stdin.put(message.data)
                case message if isinstance(message, StoreCommand) and self._cache is not None:
                    self._cache.receive(message)
                case OutputTaken():
                    self._worker_output.taken(message.count)
                case Beat():
                    pass
                case _:
                    raise ProtocolError("the launcher sent what only an agent says")

    def _answer(self, greeting: Greet) -> None:
        if self._greeting is not None:
            raise ProtocolError("the launcher said hello twice")
        if greeting.interface is not None:
            greeting = replace(greeting, interface=network.first_there(greeting.interface))
        self._greeting = greeting
        try:
            address = network.own_address(os.environ) if greeting.beats else None
            if greeting.interface is not None:
                address = network.address_of(greeting.interface)
        except LauncherError as error:
            self._channel.send(Refused(str(error), 2))
            return
        self._port = network.reserve_port()
        slots = slots_by_hardware() if greeting.count_slots else None
        if greeting.beats:
            # Not before: counting may wait for sleeping GPUs, longer than silence may last.
            self._channel.beat()
        self._channel.send(Hello(VERSION, slots, address, self._port.getsockname()[1], machine_id()))

    def _start(self, job: StartJob) -> None:
        if self._job_dir is not None or self._greeting is None:
            raise ProtocolError("the launcher started a job before it said hello, or a second one")
        ranks = ranks_of(job)
        try:
            interface = _interface_for(self._greeting.interface, job.peers)
            path = job_dir(job.token, job_directory.temporary_directory())
            job_directory.clear_abandoned(os.path.dirname(path))
            self._held_dir = job_directory.make(path)
            self._job_dir = path
            self._tell_directory(path)
            self._cache = Cache(self._channel.send, {rank: number for number, rank in ranks.items()})
            self._relay = Relay(store_socket(path), self._cache, self._selector)
        except OSError as error:
            why = in_words(error) or str(error)
            self._channel.send(Refused(f"cannot make a directory for the job, with a socket in it: {why}", 1))
            return
        except LauncherError as error:
            self._channel.send(Refused(str(error), 1))
            return
        try:
            for worker in start_workers(job, path, interface):
                self._channel.send(Started(worker.number, worker.process.pid))
                self._watch(worker)
        except CannotStartError as error:
            self._channel.send(error.refused)

    def _watch(self, worker: Worker) -> None:
        self._workers[worker.process.pid] = worker
        self._groups.append(worker.process.pid)
        self._worker_output.watch(worker)
        if (stdin := worker.process.stdin) is not None:
            self._stdins[worker.number] = WorkerStdin(
                stdin, self._selector, lambda: self._channel.send(InputWanted(worker.number))
            )

    def _signal(self, command: SignalWorkers) -> None:
        for pid, worker in self._workers.items():
            if worker.number not in command.numbers:
                continue
            if command.signum == signal.SIGKILL:
                process_tree.kill_tree(pid)
            else:
                process_tree.signal_group(pid, command.signum)

    # ------------------------------------------------------------ from workers

    def _read_signals(self) -> None:
        os.read(self._signals, 4096)  # one of them may be SIGCHLD, or that that tells that the remote parent has ended
        self._orphaned = os.getppid() != self._parent
        for pid, returncode in process_tree.reap()[0]:
            worker = self._workers.pop(pid, None)
            if worker is None:
                continue  # an orphan that we adopted
            worker.process.returncode = returncode
            self._worker_output.drain(worker)
            if stdin := self._stdins.pop(worker.number, None):
                stdin.close()
            assert self._job_dir is not None, "workers are started after it is made"
            peer_lost, left = (os.path.exists(note(self._job_dir, worker.rank)) for note in (peer_lost_file, left_file))
            self._channel.send(Exited(worker.number, returncode, peer_lost, left))


def _interface_for(chosen: str | None, peers: Collection[str]) -> str | None:
    """The interface by which the job's other hosts are reached; without any, the one that stays inside."""
    if chosen is not None:
        if peers and chosen == network.loopback_interface():
            raise LauncherError(f"{chosen} leads to no other host, and the job has some; {_WHICH}")
        return chosen
    if not peers:
        return network.loopback_interface()
    try:
        return network.interface_with(network.address_towards(peers))
    except LauncherError as error:
        raise LauncherError(f"{error}; {_WHICH}") from None


def main(tell_directory: Callable[[str], object] = lambda _: None) -> int:
    adopts = process_tree.adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would hide how workers end
    try:
        # Nothing that is started or that prints shall find the wire as its own stdin or stdout.
        commands, events = os.dup(0), os.dup(1)
        with open(os.devnull, "r+b") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                fcntl.fcntl(events, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.write(events, MARK)
        with signals_as_bytes(_SIGNALS) as signals:
            Agent(commands, events, signals, adopts=adopts, tell_directory=tell_directory).run()
    except LauncherError as error:
        print(f"hvdlite-run: agent: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the launcher went before it was greeted
        return 0
    except (OSError, RuntimeError, MemoryError) as error:
        if (why := in_words(error)) is None:
            raise
        print(f"hvdlite-run: agent: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
