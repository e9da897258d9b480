"""
`Agents`: the agents of all hosts of a job. Starts them in parallel, sends each host's part of the job, and ends them.

An agent is a process on a host, started over ssh or directly; a `RemoteAgent` is the launcher's end of the connection.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from hvdlite_wire.linux import LOOPBACK

from ..errors import LauncherError, one_reason
from ..plan.hosts import AUTO, Host, Slot, host_of_label
from ..plan.job_spec import JobSpec
from ..plan.ssh import explain
from ..plan.worker_environment import job_dir, slot_environment
from ..protocol.messages import (
    AskStatus,
    Event,
    Hello,
    Input,
    LoopFailed,
    Lost,
    Output,
    SignalWorkers,
    StartJob,
    StartWorkers,
)
from ..store.server import Store
from ..system import process_tree
from ..system.network import address_towards, own_address, some_address
from ..system.terminal_text import StatusLine
from .connection_loop import MOST_CONNECTORS, ConnectionLoop, Connectors
from .remote_agent import RemoteAgent, local_agent_argv
from .wait_for_agents import AgentAnswers, wait_for_agents

AGENT_S = 15.0  # how long an agent may take to end all processes on its host
_LOOK_S = 0.05  # how often to look whether an agent that was hung up on has ended
_FILES_OF_HOST = 3  # the pipes to its ssh client
_FILES_OF_QUESTION = 7  # while ssh -G is started: both ends of its pipes
_FILES_BESIDES = 16
_MOST_NAMED = 4
# Between attempts to connect to a host that is not there yet: doubled each time.
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.2, 2.0


class Agents:
    """The agents of all hosts. Leaving the context ends everything that the job started, also after an exception."""

    def __init__(self, job: JobSpec, events: SimpleQueue[Event], store: Store | None = None) -> None:
        self._job = job
        self._events = events
        self._token = os.urandom(8).hex()
        self._store = Store() if store is None else store
        self._agents: dict[RemoteAgent, str] = {}  # and the token of each one's job directory
        self._numbers = itertools.count()
        self._loop = ConnectionLoop(lambda error: events.put(LoopFailed(one_reason(error))))
        self._connectors = Connectors()
        self._connecting: dict[str, object] = {}  # for each host that is being connected to, what the thread holds
        self._leaving: dict[RemoteAgent, str] = {}  # those that were hung up on while the job runs, until they end
        self._failed_here: list[str] = []  # tokens of agents on this machine that could not clean up
        self._lock = threading.Lock()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def connect(self, hosts: Collection[Host]) -> dict[str, Hello]:
        """Starts an agent on every host, in parallel, and returns their answers by the hosts' labels.

        Hosts that are not there yet are tried again until the start timeout. Shows each failure at once, and raises
        `LauncherError` in the end if there was any.
        """
        return self.reach(hosts, is_patient=True).all()

    def reach(self, hosts: Collection[Host], *, is_patient: bool = False) -> AgentAnswers:
        """Starts the agents as `connect` does, but returns failures too.

        Unless ``is_patient``, each host is tried once, and no failure is shown.
        """
        status = StatusLine()
        log = status.say if self._job.verbose else lambda _: None
        far = {host.label for host in hosts if not host.is_here}

        def show_missing(missing: Collection[str]) -> None:
            if not far.isdisjoint(missing):  # those of the launcher's own machine answer at once
                status.show(_connecting(missing, len(hosts)))

        if far:
            of_questions = _FILES_OF_QUESTION * min(len(far), MOST_CONNECTORS)
            most = max(_FILES_OF_HOST * len(far), of_questions) + _FILES_BESIDES
            process_tree.require_open_files(most, f"connections to {len(far)} hosts")
        for host, argv in zip(hosts, self._argvs(hosts), strict=True):
            if not host.is_here:
                log(f"{host.label} is reached by: {shlex.join(argv)}")
            self._add(self._agent(host, argv, _FIRST_PAUSE_S if is_patient else None))
        for agent in list(self._agents):  # one that is tried again goes, and is greeted when it comes
            self._greet(agent)
        by_hand = {host.label: self._job.ssh.by_hand(host) for host in hosts}
        try:
            return wait_for_agents(
                by_hand,
                self._events,
                timeout_s=self._job.start_timeout_s,
                say=status.say if is_patient else log,
                log=log,
                on_missing=show_missing,
            )
        finally:
            status.show("")

    def _argvs(self, hosts: Collection[Host]) -> list[list[str]]:
        if all(host.is_here for host in hosts):
            return [local_agent_argv() for _ in hosts]
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  # costs 10 ms

        with ThreadPoolExecutor(MOST_CONNECTORS) as pool:
            return list(pool.map(self._argv, hosts))

    def _argv(self, host: Host) -> list[str]:
        return local_agent_argv() if host.is_here else self._job.ssh.agent_argv(host, self._job.start_timeout_s)

    def connect_later(self, label: str, slots: int) -> None:
        """Starts an agent on one more host, in one of few threads; the result is an event, `Answered` or `Lost`."""

        def host() -> Host:
            known = next((host for host in self._job.hosts if host.label == label), None)
            return host_of_label(label, slots) if known is None else replace(known, slots=slots)

        with self._lock:
            attempt = self._connecting[label] = object()
        self._connect_soon(label, attempt, host, _FIRST_PAUSE_S)

    def _try_again(self, agent: RemoteAgent, pause_s: float) -> None:
        """Connects anew to a host that is not there yet, after a pause. Does nothing if it was left."""
        label = agent.host.label
        with self._lock:
            if self._agents.pop(agent, None) is None:
                return
            attempt = self._connecting[label] = object()
        pause_after_s = min(2 * pause_s, _MOST_PAUSE_S)
        self._loop.later(pause_s, partial(self._connect_soon, label, attempt, lambda: agent.host, pause_after_s))

    def _connect_soon(self, label: str, attempt: object, host: Callable[[], Host], pause_s: float) -> None:
        on_error = partial(self._cannot_connect, label, attempt)
        try:
            self._connectors.call(partial(self._connect, label, attempt, host, pause_s), on_error)
        except RuntimeError as error:  # there can be no thread
            on_error(error)

    def _connect(self, label: str, attempt: object, find_host: Callable[[], Host], pause_s: float) -> None:
        """Does nothing more once the host has been left, or is connected to by another ``attempt``."""
        if self._connecting.get(label) is not attempt:
            return
        host = find_host()
        process_tree.require_open_files(_FILES_OF_HOST + _FILES_BESIDES, "connections to one more host")
        argv = self._argv(host)
        if self._connecting.get(label) is not attempt:
            return
        agent = self._agent(host, argv, pause_s)
        with self._lock:  # only now: on a file system that hangs it takes long to start ssh
            if is_wanted := self._connecting.get(label) is attempt:
                del self._connecting[label]
                self._add(agent)
                self._greet(agent)
        if not is_wanted:
            agent.discard()

    def _cannot_connect(self, label: str, attempt: object, error: Exception) -> None:
        with self._lock:
            if self._connecting.get(label) is attempt:
                del self._connecting[label]
                self._events.put(Lost(label, one_reason(error)))

    def _greet(self, agent: RemoteAgent) -> None:
        agent.greet(count_slots=agent.host.slots == AUTO, interface=self._job.interface_of(agent.host))

    def _add(self, agent: RemoteAgent) -> None:
        # Distinct tokens, since two hosts may share a temporary directory.
        self._agents[agent] = f"{self._token}-{next(self._numbers)}"

    def _agent(self, host: Host, argv: list[str], pause_s: float | None) -> RemoteAgent:
        """Starts an agent; ``pause_s`` later once more, if its host is not there yet, and never if that is None."""
        try:
            return RemoteAgent(
                host,
                argv,
                self._events,
                loop=self._loop,
                store=self._store,
                explain=partial(explain, host, self._job.ssh),
                try_again=None if pause_s is None else partial(self._try_again, pause_s=pause_s),
            )
        except OSError as error:
            raise LauncherError(f"cannot start {argv[0]} for {host.label}: {one_reason(error)}") from error

    def start(self, slots: Sequence[Slot], hellos: Mapping[str, Hello]) -> None:
        """Starts the workers in ``slots``. Hangs up on agents whose hosts have none."""
        hosts = list(dict.fromkeys(slot.host for slot in slots))
        used = [host.label for host in hosts]
        addresses = _addresses(hosts, hellos)
        first = slots[0].host.label
        own = partial(
            slot_environment, size=len(slots), master_address=addresses[first], master_port=hellos[first].port
        )
        by_host: dict[str, dict[int, Mapping[str, str]]] = {}
        for slot in slots:
            by_host.setdefault(slot.host.label, {})[slot.number] = own(slot)
        for agent in self._agents:
            label = agent.host.label
            if workers := by_host.get(label):
                peers = tuple(addresses[other] for other in used if other != label)
                self._start(agent, workers, slots=len(workers), peers=peers)
            else:
                agent.hang_up()

    def start_worker(self, label: str, worker: int, variables: Mapping[str, str], hellos: Mapping[str, Hello]) -> None:
        """Starts one more worker on a host that has answered; ``hellos`` are the answers of all hosts there are now."""
        agent = self._agent_on(label)
        if agent is None:  # it is lost, which is an event that comes
            return
        if agent.workers:
            agent.workers = {*agent.workers, worker}
            agent.send(StartWorkers({worker: variables}))
            return
        slots = agent.host.slots or hellos[label].slots or 1
        has_one_host = self._job.elastic is None or (self._job.elastic.discovery is None and len(self._job.hosts) == 1)
        is_chosen = self._job.interface_of(agent.host) is not None
        addresses = {label: hello.address for label, hello in hellos.items()}
        peers = () if has_one_host or (is_chosen and len(hellos) == 1) else _peers(agent.host, addresses)
        self._start(agent, {worker: variables}, slots=slots, peers=peers)

    def _start(
        self, agent: RemoteAgent, workers: Mapping[int, Mapping[str, str]], *, slots: int, peers: tuple[str, ...]
    ) -> None:
        here = agent.host.is_here
        agent.workers = set(workers)
        agent.send(
            StartJob(
                token=self._agents[agent],
                command=self._job.command,
                in_python=self._job.in_python,
                as_horovod=self._job.as_horovod,
                forks=self._job.elastic is not None and self._job.elastic.forks,
                slots=slots,
                cwd=self._job.cwd,
                environment=self._job.environment.here if here else self._job.environment.elsewhere,
                inherits=not here,
                peers=peers,
                workers=workers,
            )
        )

    def _agent_on(self, label: str) -> RemoteAgent | None:
        return next((agent for agent in list(self._agents) if agent.host.label == label), None)

    def label_here(self) -> str:
        """Returns the label of the launcher's own machine, if the job has an agent there; otherwise ""."""
        return next((agent.host.label for agent in list(self._agents) if agent.host.is_here), "")

    def leave(self, label: str) -> None:
        """Hangs up on the agent of a host, which may be lost already. Its host may be connected to anew then."""
        with self._lock:
            self._connecting.pop(label, None)
            agent = self._agent_on(label)
            if agent is None:
                return
            self._leaving[agent] = self._agents.pop(agent)
        agent.hang_up()
        self._loop.call(partial(self._reap, agent, time.monotonic() + AGENT_S))

    def _reap(self, agent: RemoteAgent, give_up_at: float) -> None:
        if (exit_code := agent.exit_code(is_late=time.monotonic() >= give_up_at)) is None:
            self._loop.later(_LOOK_S, partial(self._reap, agent, give_up_at))
            return
        with self._lock:
            token = self._leaving.pop(agent, None)  # None: `end` looks after it
            if token is not None and exit_code and agent.host.is_here:
                self._failed_here.append(token)

    def signal(self, numbers: Collection[int], signum: int) -> None:
        for agent in list(self._agents):
            if own := tuple(number for number in numbers if number in agent.workers):
                agent.send(SignalWorkers(own, signum))

    def ask_status(self, question: AskStatus) -> None:
        for agent in list(self._agents):
            if agent.workers:
                agent.send(question)

    def kill_agent(self, label: str) -> None:
        """Kills the agent on a host, or the ssh client to it. The host is then lost, which is an event."""
        if (agent := self._agent_on(label)) is not None:
            agent.kill()

    def feed(self, worker: int, data: bytes) -> None:
        for agent in list(self._agents):
            if worker in agent.workers:
                agent.send(Input(worker, data))

    def output_shown(self, output: Output) -> None:
        """Reports that ``output`` was shown or discarded, so that its agent may send as much again.

        Must be called for all output, and from one thread only.
        """
        for agent in list(self._agents):
            if output.worker in agent.workers:
                agent.output_shown(len(output.data))

    def end(self, timeout_s: float = AGENT_S) -> None:
        """Hangs up on all agents and waits until they have ended; cleans up on this machine if one of them failed."""
        with self._lock:
            self._connecting.clear()
            agents = {**self._leaving, **self._agents}
            self._leaving, self._agents = {}, {}
        for agent in agents:
            agent.hang_up()
        give_up_at = time.monotonic() + timeout_s
        exit_codes = [agent.wait(max(0.0, give_up_at - time.monotonic())) for agent in agents]
        if self._loop.close():
            for agent in agents:
                agent.close()
        failed_here, self._failed_here = self._failed_here, []
        if any(exit_codes) or failed_here:
            # Imported here since it takes 10 ms, and agents seldom fail.
            from ..system.job_directory import temporary_directory  # noqa: PLC0415

            # Descendants here are local workers and ssh clients; on other hosts the remote parent does the same.
            process_tree.kill_descendants()
            with contextlib.suppress(LauncherError):  # without one, the agent made no directory either
                within = temporary_directory()
                for token in [*failed_here, *(token for agent, token in agents.items() if agent.host.is_here)]:
                    shutil.rmtree(job_dir(token, within), ignore_errors=True)


def _connecting(missing: Collection[str], count: int) -> str:
    names = sorted(missing)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"connecting to {count} host{'s' if count > 1 else ''}: waiting for {', '.join(names[:_MOST_NAMED])}{more}"


def _addresses(hosts: Collection[Host], hellos: Mapping[str, Hello]) -> dict[str, str]:
    """Returns the address of each host for the others, by its label; raises `LauncherError` if a host has none."""
    if len(hosts) == 1:
        return {host.label: LOOPBACK for host in hosts}
    addresses: dict[str, str] = {}
    for host in sorted(hosts, key=lambda host: host.is_here):
        address = hellos[host.label].address
        if address is None and host.is_here:
            # For the others, the launcher's machine has the address from which it reaches them.
            address = address_towards(addresses.values())
        if address is None:
            why = "it has no address at which other hosts can reach it"
            raise LauncherError(f"{host.label}: {why}; choose a network with --network-interface")
        addresses[host.label] = address
    return addresses


def _peers(host: Host, addresses: Mapping[str, str | None]) -> tuple[str, ...]:
    """Returns addresses that lead to other hosts of an elastic job, where more may come while it runs.

    ``addresses`` are those of all hosts that there are, by their labels.
    """
    others = tuple(address for label, address in addresses.items() if label != host.label and address is not None)
    if others:
        return others
    # The interface by which the launcher reaches this host, or the one that leads out of the launcher's machine. None
    # does without a default route, though there may be other hosts in its network.
    own = addresses[host.label] or own_address({}) or some_address()
    return () if own is None else (own,)
