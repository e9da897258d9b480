"""The agents of all hosts of a job: starts them together, gives each its part of the job, and ends them.

Each one is a `remote_agent.RemoteAgent`. What their events mean is decided in `wait_for_agents` at
first, then in `supervisor`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

from ..errors import LauncherError, in_words
from ..plan.hosts import AUTO, Host
from ..plan.job_spec import JobSpec
from ..plan.slots import Slot
from ..plan.ssh import explain
from ..plan.worker_environment import job_dir, slot_environment
from ..store.server import Store
from ..system import process_tree
from ..system.network import address_towards
from ..system.terminal_text import say
from ..wire.messages import Event, Hello, Input, Output, SignalWorkers, StartJob
from .remote_agent import RemoteAgent, local_agent_argv
from .wait_for_agents import AgentAnswers, wait_for_agents

AGENT_S = 15.0  # for an agent to end all that runs on its host
_LOOPBACK = "127.0.0.1"


class Agents:
    """The agents of all hosts; on leaving, whatever happened, nothing of the job is left."""

    def __init__(self, job: JobSpec, events: SimpleQueue[Event], store: Store | None = None) -> None:
        self._job = job
        self._events = events
        self._token = os.urandom(8).hex()
        self._store = Store() if store is None else store
        self._agents: list[RemoteAgent] = []

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def connect(self, hosts: Collection[Host]) -> dict[str, Hello]:
        """Start an agent on every host, all at once, and give their answers by the hosts' labels.

        Each that fails is told at once; in the end that is a `LauncherError`.
        """
        return self.reach(hosts, tell=say).all()

    def reach(self, hosts: Collection[Host], tell: Callable[[str], object] | None = None) -> AgentAnswers:
        """The same, but that a host failed is a part of what is given; ``tell`` is told of it at once."""
        log = say if self._job.verbose else _say_nothing
        for host, argv in zip(hosts, self._argvs(hosts), strict=True):
            if not host.is_here:
                log(f"{host.label} is reached by: {shlex.join(argv)}")
            self._agents.append(self._agent(host, argv))
        for agent in self._agents:
            host = agent.host
            agent.greet(count_slots=host.slots == AUTO, interface=self._job.interface_of(host))
        by_hand = {host.label: self._job.ssh.by_hand(host) for host in hosts}
        return wait_for_agents(by_hand, self._events, timeout_s=self._job.start_timeout_s, say=tell or log, log=log)

    def _argvs(self, hosts: Collection[Host]) -> list[list[str]]:
        if all(host.is_here for host in hosts):
            return [local_agent_argv() for _ in hosts]
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  # costs 10 ms

        ssh, timeout_s = self._job.ssh, self._job.start_timeout_s
        with ThreadPoolExecutor(32) as pool:  # each asks ssh for the user's configuration
            return list(pool.map(lambda h: local_agent_argv() if h.is_here else ssh.agent_argv(h, timeout_s), hosts))

    def _agent(self, host: Host, argv: list[str]) -> RemoteAgent:
        try:
            return RemoteAgent(
                host,
                argv,
                self._events,
                store=self._store,
                explain=partial(explain, host, self._job.ssh),
            )
        except OSError as error:
            why = in_words(error) or error.strerror
            raise LauncherError(f"cannot start {argv[0]} for {host.label}: {why}") from error

    def start(self, slots: Sequence[Slot], hellos: Mapping[str, Hello]) -> None:
        """Start the workers. An agent on whose host none has a place is sent home."""
        hosts = list(dict.fromkeys(slot.host for slot in slots))
        used = [host.label for host in hosts]
        addresses = _addresses(hosts, hellos)
        first = slots[0].host.label
        own = partial(
            slot_environment, size=len(slots), master_address=addresses[first], master_port=hellos[first].port
        )
        for number, agent in enumerate(self._agents):
            label, here = agent.host.label, agent.host.is_here
            workers = {slot.number: own(slot) for slot in slots if slot.host.label == label}
            if not workers:
                agent.hang_up()
                continue
            agent.workers = workers.keys()
            agent.send(
                StartJob(
                    token=self._token_of(number),  # two of the hosts may share their temporary directory
                    command=self._job.command,
                    in_python=self._job.in_python,
                    as_horovod=self._job.as_horovod,
                    cwd=self._job.cwd,
                    environment=self._job.environment.here if here else self._job.environment.elsewhere,
                    inherits=not here,
                    peers=tuple(addresses[other] for other in used if other != label),
                    workers=workers,
                )
            )

    def signal(self, numbers: Collection[int], signum: int) -> None:
        """Send a signal to the workers with these numbers."""
        for agent in self._agents:
            if own := tuple(number for number in numbers if number in agent.workers):
                agent.send(SignalWorkers(own, signum))

    def feed(self, worker: int, data: bytes) -> None:
        """Send input to the worker with this number."""
        for agent in self._agents:
            if worker in agent.workers:
                agent.send(Input(worker, data))

    def output_shown(self, output: Output) -> None:
        """It is done with: its agent may send as much again. To be told of all output, in one thread."""
        for agent in self._agents:
            if output.worker in agent.workers:
                agent.output_shown(len(output.data))

    def end(self, timeout_s: float = AGENT_S) -> None:
        """Hang up on all, wait until they are gone, and do their work here for any that was lost."""
        agents, self._agents = self._agents, []
        for agent in agents:
            agent.hang_up()
        give_up_at = time.monotonic() + timeout_s
        exit_codes = [agent.wait(max(0.0, give_up_at - time.monotonic())) for agent in agents]
        if any(exit_codes):
            # Here, since it costs 10 ms, and agents are seldom lost.
            from ..system.job_directory import temporary_directory  # noqa: PLC0415

            # Here, and what stood between us and another host; there the remote parent does the same.
            process_tree.kill_descendants()
            with contextlib.suppress(LauncherError):  # then there was none for the agent either
                within = temporary_directory()
                for number, agent in enumerate(agents):
                    if agent.host.is_here:
                        shutil.rmtree(job_dir(self._token_of(number), within), ignore_errors=True)

    def _token_of(self, number: int) -> str:
        return f"{self._token}-{number}"


def _addresses(hosts: Collection[Host], hellos: Mapping[str, Hello]) -> dict[str, str]:
    """Where the others reach each host, by its label; a `LauncherError` if one knows of no way to itself."""
    if len(hosts) == 1:
        return {host.label: _LOOPBACK for host in hosts}
    addresses: dict[str, str] = {}
    for host in sorted(hosts, key=lambda host: host.is_here):
        address = hellos[host.label].address
        if address is None and host.is_here:
            # The launcher's own machine is reached at the address from which it reaches the others.
            address = address_towards(addresses.values())
        if address is None:
            why = "it knows of no address at which other hosts could reach it"
            raise LauncherError(f"{host.label}: {why}; --network-interface says which network to use")
        addresses[host.label] = address
    return addresses


def _say_nothing(_: str) -> None:
    pass
