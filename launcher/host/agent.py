"""The agent process: starts one host's workers, and ends every process that they leave behind.

`remote_parent` forks it, and cleans up if it is killed; `python -m hvdlite_launcher.host.agent` starts it without one.
It reads commands on stdin and writes events on stdout (see `channel`).

The launcher makes all decisions but one. When stdin ends, or the launcher is silent for too long, the agent kills all
processes of the job on this host and removes the job's directory. It is one thread with one event loop that never
blocks: a launcher that does not read delays the workers' output, but never the end of the job.

SIGTERM, SIGINT and SIGHUP do not end the agent. A scheduler that signals all processes of a job signals the launcher
too, which ends the job; until then the workers may need the time, for example to write a checkpoint.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from hvdlite_wire.job_contract import Note, note_file
from hvdlite_wire.linux import interface_with

from ..errors import LauncherError, ProtocolError, in_words
from ..plan.python_command import parse_python
from ..plan.worker_environment import job_dir, store_socket
from ..protocol.channel import MARK, SILENCE_S, Channel
from ..protocol.messages import (
    AskStatus,
    Beat,
    Exited,
    Greet,
    Hello,
    InitDone,
    Input,
    InputWanted,
    OfWorker,
    OutputTaken,
    PeakMemory,
    Refused,
    SignalWorkers,
    Started,
    StartJob,
    StartWorkers,
)
from ..protocol.store_messages import StoreCommand, StoreEvent
from ..store.relay import Cache, Relay
from ..system import job_directory, network, process_tree
from ..system.machine import machine_id, slots_by_hardware
from ..system.process_tree import signals_as_bytes
from ..version import VERSION
from .forked_workers import ForkedWorkers
from .status_collector import HostLoad, StatusCollector
from .worker_processes import (
    CannotStartError,
    KilledWorkers,
    Worker,
    WorkerOutput,
    WorkerStdin,
    command_of,
    common_environment,
    start_workers,
)

_Timed = Channel | KilledWorkers | ForkedWorkers | Relay

_PIPE_BYTES = 1 << 20
# Of each worker: the ends of its pipes, its connections to the store, a question to it, and the pidfds of its threads.
_FILES_OF_WORKER = 10
_WHICH = "choose one with --network-interface"
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Signals that a program has its own use for, and that end a process which has none.
_FOR_HANDLERS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class HostJob:
    """This host's part of the job, once there is a directory for it.

    ``interface`` is the network interface towards the job's other hosts. ``lock`` holds the directory's lock until this
    process ends. ``started`` are the numbers of all workers that were ever to be started here.
    """

    spec: StartJob
    directory: str
    interface: str | None = None
    lock: int | None = None
    started: set[int] = field(default_factory=set)
    cache: Cache | None = None
    relay: Relay | None = None

    def environment(self) -> dict[str, str]:
        """Returns the variables of all its workers; raises `CannotStartError`."""
        return common_environment(self.spec, self.directory, self.interface)


class Agent:
    """The event loop over three file descriptors: commands to read, events to write, and received signals as bytes."""

    def __init__(self, commands: int, events: int, signals: int, *, report_directory: Callable[[str], object]) -> None:
        """``report_directory`` is called with the job's directory: if this process dies, its parent removes that."""
        self._commands = commands
        self._signals = signals
        self._report_directory = report_directory
        self._selector = selectors.DefaultSelector()
        self._channel = Channel(commands, events, self._selector)
        self._worker_output = WorkerOutput(self._selector, self._channel)
        self._status = StatusCollector(self._selector, self._channel.send, HostLoad(self._selector))
        self._greeting: Greet | None = None
        self._port: socket.socket | None = None  # reserves the port, see `network.reserve_port`
        self._workers: dict[int, Worker] = {}  # the running ones, by pid
        self._killed: dict[int, Worker] = {}  # those whose end is told, and that are not reaped yet, by pid
        self._killed_workers = KilledWorkers(self._selector, self._on_killed)
        self._forked_workers = ForkedWorkers(self._selector, self._on_started)
        self._timed: list[_Timed] = [self._channel, self._killed_workers, self._forked_workers]
        self._stdins: dict[int, WorkerStdin] = {}  # by the worker's number
        self._job: HostJob | None = None
        self._has_refused = False
        self._parent = os.getppid()

    def run(self) -> None:
        """Runs until the launcher hangs up or the remote parent dies, then kills all processes and cleans up.

        Raises `LauncherError` if a process could not be killed, or if the launcher was silent for too long.
        """
        self._listen(self._commands, self._read_commands)
        self._listen(self._signals, self._read_signals)
        try:
            while os.getppid() == self._parent and not self._channel.closed:
                times = [each.time_left_s() for each in self._timed]
                for key, _ in self._selector.select(min((each for each in times if each is not None), default=None)):
                    key.data()
                for timed in self._timed:
                    timed.tick()
                self._channel.flush()
                self._worker_output.hold_up()
        finally:
            self._end()
        if self._channel.silent:  # a launcher that was only stopped, as by Ctrl-Z, reads this when it continues
            raise LauncherError(f"no message from the launcher for {SILENCE_S:g} s: the workers here were killed")

    def _listen(self, fd: int, react: Callable[[], object]) -> None:
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, react)

    def _end(self) -> None:
        everything_ended = process_tree.kill_descendants()
        if self._job is not None:
            if self._job.relay is not None:
                self._job.relay.close()
            shutil.rmtree(self._job.directory, ignore_errors=True)
        if not everything_ended:
            raise LauncherError("some processes of the job could not be killed")

    # ------------------------------------------------------- from the launcher

    def _read_commands(self) -> None:  # noqa: PLR0912  # one place for the reaction to each command
        for message in self._channel.receive():
            match message:
                case Greet():
                    self._answer(message)
                case StartJob():
                    self._prepare(message)
                case StartWorkers():
                    self._start(message.workers)
                case SignalWorkers():
                    self._signal(message)
                case AskStatus():
                    if self._job is not None:
                        pids = {worker.number: pid for pid, worker in self._workers.items()}
                        self._status.ask(message, pids, self._job.directory)
                case Input():
                    if stdin := self._stdins.get(message.worker):
                        stdin.put(message.data)
                case message if isinstance(message, StoreCommand) and self._job is not None and self._job.cache:
                    self._job.cache.receive(message)
                case OutputTaken():
                    self._worker_output.taken(message.count)
                case Beat():
                    pass
                case _:
                    raise ProtocolError("the launcher sent a message that only an agent may send")

    def _answer(self, greeting: Greet) -> None:
        if self._greeting is not None:
            raise ProtocolError("the launcher sent Greet twice")
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
            # Only now: counting may wait for sleeping GPUs for longer than SILENCE_S.
            self._channel.beat()
        self._channel.send(Hello(VERSION, slots, address, self._port.getsockname()[1], machine_id()))

    def _prepare(self, spec: StartJob) -> None:
        if self._job is not None or self._has_refused or self._greeting is None:
            raise ProtocolError("the launcher sent StartJob before Greet, or twice")
        directory = "the directory for temporary files"
        try:
            interface = _interface_for(self._greeting.interface, spec.peers)
            self._status.load.follow(interface if spec.peers else None)
            directory = job_directory.temporary_directory()
            path = job_dir(spec.token, directory)
            job_directory.clear_abandoned(os.path.dirname(path))
            job = self._job = HostJob(spec, path, interface, job_directory.make(path))
            self._report_directory(path)
            job.cache = Cache(self._send_of_worker, job.started)
            job.relay = Relay(store_socket(path), job.cache, self._selector)
            self._timed.append(job.relay)
        except OSError as error:
            why = in_words(OSError(error.errno, "")) or error.strerror or str(error)
            what = f"cannot create the job's directory in {directory}, and a socket in it"
            self._refuse(f"{what}: {why}")
        except LauncherError as error:
            self._refuse(str(error))
        else:
            self._start(spec.workers)

    def _refuse(self, why: str) -> None:
        self._has_refused = True
        self._channel.send(Refused(why, 1))

    def _start(self, workers: Mapping[int, Mapping[str, str]]) -> None:
        if self._has_refused:
            return
        job = self._job
        if job is None or not job.started.isdisjoint(workers):
            raise ProtocolError("the launcher started workers of no job, or one of them twice")
        job.started.update(workers)  # in place: the cache knows this set
        process_tree.allow_open_files(_FILES_OF_WORKER * len(workers))
        self._start_anew(job, {number: own for number, own in workers.items() if not self._is_forked(job, number, own)})

    def _is_forked(self, job: HostJob, number: int, own: Mapping[str, str]) -> bool:
        """Returns whether this worker was asked of the fork server, which has no standard input to give to one."""
        if number == 0 or not self._forked_workers.is_ready:
            return False

        def start_anew(signals: Sequence[int]) -> None:
            self._start_anew(job, {number: own})
            for signum in signals:
                self._signal(SignalWorkers((number,), signum))

        with contextlib.suppress(CannotStartError):  # which the other way tells
            return self._forked_workers.ask(number, {**job.environment(), **own}, start_anew)
        return False

    def _start_anew(self, job: HostJob, workers: Mapping[int, Mapping[str, str]]) -> None:
        """Starts workers as new processes; if one cannot be started, says why and starts no more of them."""
        left = list(workers)
        try:
            for worker in start_workers(job.spec, workers, job.environment()):
                left.remove(worker.number)
                self._on_started(worker)
        except CannotStartError as error:
            self._channel.send(replace(error.refused, worker=left[0]))

    def _on_started(self, worker: Worker) -> None:
        self._channel.send(Started(worker.number, worker.process.pid))
        self._workers[worker.process.pid] = worker
        self._worker_output.watch(worker)
        if (stdin := worker.process.stdin) is not None:
            self._stdins[worker.number] = WorkerStdin(
                stdin, self._selector, lambda: self._channel.send(InputWanted(worker.number))
            )

    def _signal(self, command: SignalWorkers) -> None:
        if command.signum not in _FOR_HANDLERS:
            for number in command.numbers:
                self._forked_workers.keep_signal(number, command.signum)
        for pid, worker in self._workers.items():
            if worker.number not in command.numbers:
                continue
            if command.signum == signal.SIGKILL:
                process_tree.kill_tree(pid)
            elif command.signum in _FOR_HANDLERS:
                process_tree.signal_handlers(pid, command.signum)
            else:
                process_tree.signal_group(pid, command.signum)

    # ------------------------------------------------------------ from workers

    def _read_signals(self) -> None:
        os.read(self._signals, 4096)  # SIGCHLD, or the signal for the death of the remote parent
        for pid, returncode, peak_memory in process_tree.reap()[0]:
            self._killed_workers.forget(pid)
            if (worker := self._workers.pop(pid, None)) is not None:
                worker.process.returncode = returncode
                self._tell_end(worker, returncode, peak_memory)
            elif (worker := self._killed.pop(pid, None)) is not None:
                worker.process.returncode = returncode
                self._channel.send(PeakMemory(worker.number, peak_memory))
            else:
                self._forked_workers.reaped(pid, returncode)

    def _send_of_worker(self, message: OfWorker | StoreEvent) -> None:
        self._channel.send(message)
        # In an elastic job, where the others go on: they wait for nothing but the word that it has ended.
        if isinstance(message, InitDone) and message.after is not None:
            for pid, worker in self._workers.items():
                if worker.number == message.worker:
                    self._killed_workers.watch(pid)
            self._start_fork_server_soon()

    def _start_fork_server_soon(self) -> None:
        job = self._job
        if job is None or not job.spec.forks or self._forked_workers.is_planned:
            return
        with contextlib.suppress(CannotStartError):  # which is told when the next worker is started
            environment = job.environment()
            if (command := parse_python(command_of(job.spec), environment)) is not None:
                self._forked_workers.start_soon(command, job.spec.cwd, environment)

    def _on_killed(self, pid: int, signum: int) -> None:
        worker = self._killed[pid] = self._workers.pop(pid)
        self._tell_end(worker, -signum, 0)

    def _tell_end(self, worker: Worker, returncode: int, peak_memory: int) -> None:
        self._worker_output.drain(worker)
        if stdin := self._stdins.pop(worker.number, None):
            stdin.close()
        assert self._job is not None, "workers are started after it"
        file_of = partial(note_file, self._job.directory, worker.number)
        notes: tuple[Note, ...] = ("peer-lost", "left", "peer-left", "apart", "met")
        peer_lost, left, peer_left, apart, met = (_was_there(file_of(note)) for note in notes)
        self._status.note_end(worker.number, worker.process.pid, file_of("progress"))
        self._channel.send(
            Exited(worker.number, returncode, peer_lost, left, peer_left, peak_memory, apart=apart and not met)
        )


def _was_there(path: str) -> bool:
    """Removes a file, and returns whether there was one. An elastic job may have many workers."""
    with contextlib.suppress(OSError):
        os.unlink(path)
        return True
    return False


def _interface_for(chosen: str | None, peers: Collection[str]) -> str | None:
    """Returns the network interface towards ``peers``, the job's other hosts; without any, the loopback interface.

    ``chosen`` is the user's choice, if any. Raises `LauncherError` if no interface leads to the peers.
    """
    if chosen is not None:
        if peers and chosen == network.loopback_interface():
            raise LauncherError(f"{chosen} does not reach the job's other hosts; {_WHICH}")
        return chosen
    if not peers:
        return network.loopback_interface()
    try:
        return interface_with(network.address_towards(peers))
    except LauncherError as error:
        raise LauncherError(f"{error}; {_WHICH}") from None


def main(report_directory: Callable[[str], object] = lambda _: None) -> int:
    """Runs an agent and returns its exit code: 0 if nothing of the job is left on this host."""
    process_tree.adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # may be inherited as ignored: return codes would be lost
    try:
        # Workers, and anything here that prints, must not use the connection to the launcher as stdin or stdout.
        commands, events = os.dup(0), os.dup(1)
        with open(os.devnull, "r+b") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        with contextlib.suppress(OSError):
            fcntl.fcntl(events, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.write(events, MARK)
        with signals_as_bytes(_SIGNALS) as signals:
            Agent(commands, events, signals, report_directory=report_directory).run()
    except LauncherError as error:
        print(f"hvdlite-run: agent: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the launcher ended before it sent `Greet`
        return 0
    except (OSError, RuntimeError, MemoryError) as error:
        if (why := in_words(error)) is None:
            raise
        print(f"hvdlite-run: agent: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
