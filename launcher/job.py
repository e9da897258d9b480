"""One job from its plan to its exit code: starts the agents, joins them to the supervisor, and leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue

from . import tree
from .errors import LauncherError, UsageError
from .output import Screen
from .plan import Slot, job_dir, slot_environment
from .protocol import Event, Input, Interrupted, ScreenDone, SignalRanks, StartJob
from .record import Record
from .remote import RemoteAgent
from .signals import signals_as_bytes
from .stdin import Stdin
from .supervise import Supervisor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGENT_S = 15.0  # for an agent to end all that runs on its host
# The same where somebody waits for the end, and for the screen to take the last of the output then.
_HASTY_AGENT_S, _HASTY_SCREEN_S = 2.0, 1.0


def run_job(
    slots: Sequence[Slot],
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    grace: float,
    verbose: bool = False,
    timestamps: bool = False,
    record_dir: str | None = None,
) -> int:
    """Run ``command`` in every slot and give the launcher's exit code. ``grace`` is in seconds.

    ``environment`` is what all workers get, to which each slot's own is added.
    ``timestamps`` begin each line on the screen; ``record_dir`` is where each worker's output goes too.

    This process adopts what the job leaves behind, and handles INT, TERM and HUP meanwhile: it must have no
    other children, and this must be its main thread.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    record = None if record_dir is None else Record(record_dir, len(slots))
    screen = Screen(events, timestamps=timestamps, record=record)
    log = screen.say if verbose else _say_nothing
    token = os.urandom(8).hex()
    tree.adopt_orphans()
    with _signals_as_events(events), _Agents(slots, events, screen.room, token) as agents:
        for slot in slots:
            log(f"rank {slot.rank}: {slot.host.name}, local rank {slot.local_rank} of {slot.local_size}")
        agents.start(command, _working_directory(), environment)
        supervisor = Supervisor(
            slots,
            signal_ranks=agents.signal,
            send_input=agents.feed,
            stdin=Stdin(events),
            screen=screen,
            log=log,
            grace=grace,
        )
        outcome = supervisor.run(events)
        agents.end(timeout_s=_HASTY_AGENT_S if outcome.hasty else _AGENT_S)
        log("no process of the job is left")
        if outcome.report:
            screen.say(outcome.report)
        screen.close()
        _wait_for_screen(events, timeout_s=_HASTY_SCREEN_S if outcome.hasty else None)
    return outcome.exit_code


class _Agents:
    """The agents of all hosts; on leaving, whatever happened, nothing of the job is left."""

    def __init__(
        self, slots: Sequence[Slot], events: SimpleQueue[Event], room: threading.Semaphore, token: str
    ) -> None:
        self._slots = slots
        self._events = events
        self._room = room
        self._token = token
        self._agents: list[RemoteAgent] = []

    def __enter__(self) -> _Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, command: Sequence[str], cwd: str, environment: Mapping[str, str]) -> None:
        size = len(self._slots)
        for host in dict.fromkeys(slot.host for slot in self._slots):
            workers = {slot.rank: slot_environment(slot, size) for slot in self._slots if slot.host == host}
            try:
                agent = RemoteAgent(host, workers.keys(), self._events, room=self._room)
            except OSError as error:
                raise LauncherError(f"cannot start the agent on {host.name}: {error}") from error
            self._agents.append(agent)
            agent.send(StartJob(self._token, tuple(command), cwd, environment, workers))

    def signal(self, ranks: Collection[int], signum: int) -> None:
        for agent in self._agents:
            agent.send(SignalRanks(tuple(ranks), signum))

    def feed(self, data: bytes) -> None:
        """Send input to rank 0, which the first host has."""
        self._agents[0].send(Input(0, data))

    def end(self, timeout_s: float = _AGENT_S) -> None:
        """Hang up on all, wait until they are gone, and do their work here for any that was lost."""
        agents, self._agents = self._agents, []
        for agent in agents:
            agent.hang_up()
        exit_codes = [agent.wait(timeout_s) for agent in agents]
        if any(exit_codes):
            import tempfile  # noqa: PLC0415  # costs 10 ms, and agents are seldom lost

            tree.kill_descendants()
            shutil.rmtree(job_dir(self._token, tempfile.gettempdir()), ignore_errors=True)


@contextlib.contextmanager
def _signals_as_events(events: SimpleQueue[Event]) -> Iterator[None]:
    with signals_as_bytes(_SIGNALS) as pipe:
        threading.Thread(target=_pass_signals_on, args=(pipe, events), daemon=True, name="signals").start()
        yield


def _pass_signals_on(pipe: int, events: SimpleQueue[Event]) -> None:
    while received := os.read(pipe, 64):
        for signum in received:
            if signum in _SIGNALS:
                events.put(Interrupted(signum))
    os.close(pipe)


def _wait_for_screen(events: SimpleQueue[Event], timeout_s: float | None) -> None:
    """Until all is written, or the user will not wait for a screen that stands still."""
    with contextlib.suppress(Empty):
        while not isinstance(events.get(timeout=timeout_s), ScreenDone | Interrupted):
            pass


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory does not exist any more") from None


def _say_nothing(_: str) -> None:
    pass
