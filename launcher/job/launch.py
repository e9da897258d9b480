"""Runs one job from its plan to its exit code: reaches the hosts, starts the workers, supervises them, cleans up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue

from ..agents.agent_group import AGENT_S, Agents
from ..errors import UsageError
from ..plan.hosts import AUTO, Host, count_auto_slots, each_machine_once
from ..plan.job_spec import JobSpec
from ..plan.slots import Slot, plan_slots
from ..store.server import Store
from ..system import process_tree
from ..system.signals import signals_as_bytes
from ..wire.messages import Event, Interrupted, ScreenDone
from .failure_message import Outcome
from .launcher_stdin import Stdin, echoes
from .output_files import OutputFiles
from .screen import Screen
from .supervisor import Supervisor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Where somebody waits for the end: for an agent to end what runs, and for the screen to take the last of the output.
_HASTY_AGENT_S, _HASTY_SCREEN_S = 2.0, 1.0


def launch(job: JobSpec, store: Store | None = None) -> Outcome:
    """Run it and say how it ended.

    ``store`` is where workers meet, if the caller has a word to say there; the caller, not the screen, is then told
    why it failed.

    This process adopts what the job leaves behind, and handles INT, TERM and HUP meanwhile: it must have no
    other children, and this must be its main thread.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    process_tree.adopt_orphans()
    # What the command line has wrong is told before any host is troubled.
    if job.hosts[0].is_here:  # where rank 0 is, which writes it
        _require_timeline(job.environment.here, job.cwd)
    slots = None if any(host.slots == AUTO for host in job.hosts) else plan_slots(job.hosts, job.size)
    files = None if slots is None else _output_files(job, slots)
    with signals_as_events(events), Agents(job, events, store) as agents:
        hosts = job.hosts if slots is None else tuple(dict.fromkeys(slot.host for slot in slots))
        hellos = agents.connect(hosts)
        machines = each_machine_once(hosts, lambda host: hellos[host.label].machine)
        if slots is None or len(machines) < len(hosts):
            slots = plan_slots(count_auto_slots(machines, lambda host: hellos[host.label].slots or 1), job.size)
        files = files or _output_files(job, slots)
        workers = {slot.number: slot for slot in slots}
        screen = Screen(
            events,
            agents.output_shown,
            timestamps=job.timestamps,
            files=files,
            rank_of=lambda number: workers[number].rank,
        )
        log = screen.say if job.verbose else _say_nothing
        if len(machines) < len(hosts):
            names = ", ".join(host.label for host in hosts if host.label not in {one.label for one in machines})
            screen.say(f"these are further names of hosts that are there already, and not hosts of their own: {names}")
        for slot in slots:
            log(f"rank {slot.rank}: {slot.host.label}, local rank {slot.local_rank} of {slot.local_size}")
        agents.start(slots, hellos)

        def send_input(worker: int, data: bytes) -> None:
            if data.endswith(b"\n") and echoes():
                screen.typed()
            agents.feed(worker, data)

        supervisor = Supervisor(
            workers,
            signal_workers=agents.signal,
            send_input=send_input,
            stdin=Stdin(events),
            screen=screen,
            log=log,
            grace=job.grace_s,
            start_timeout_s=job.start_timeout_s,
        )
        outcome = supervisor.run(events)
        agents.end(timeout_s=_HASTY_AGENT_S if outcome.hasty else AGENT_S)
        log("no process of the job is left")
        if outcome.message and store is None:
            screen.say(outcome.message)
        screen.close()
        _wait_for_screen(events, timeout_s=_HASTY_SCREEN_S if outcome.hasty else None)
    return outcome


def count_slots(job: JobSpec) -> tuple[Host, ...]:
    """The job's hosts, each with a number of slots; those that only they can count are asked."""
    events: SimpleQueue[Event] = SimpleQueue()
    unknown = tuple(host for host in job.hosts if host.slots == AUTO)
    if not unknown:
        return job.hosts
    with signals_as_events(events), Agents(job, events) as agents:
        hellos = agents.connect(unknown)
        return count_auto_slots(job.hosts, lambda host: hellos[host.label].slots or 1)


@contextlib.contextmanager
def signals_as_events(events: SimpleQueue[Event]) -> Iterator[None]:
    """Meanwhile INT, TERM and HUP are events for whoever reads these."""
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


def _output_files(job: JobSpec, slots: Sequence[Slot]) -> OutputFiles | None:
    return None if job.record_dir is None else OutputFiles(job.record_dir, {slot.number: slot.rank for slot in slots})


def _require_timeline(environ: Mapping[str, str], cwd: str) -> None:
    """A UsageError where the file of the timeline that the workers' environment asks for cannot be written here."""
    name = next((name for name in ("HVDLITE_TIMELINE", "HOROVOD_TIMELINE") if name in environ), None)
    file = "" if name is None else environ[name].strip()
    if not file or file == "DYNAMIC":  # that is no file: the program starts the timeline
        return
    path = os.path.join(cwd, file)
    directory = os.path.dirname(path)
    if not os.path.exists(directory):
        why = f"there is no directory {directory}: make it"
    elif not os.path.isdir(directory):
        why = f"{directory} is no directory"
    elif os.path.exists(path) and not os.path.isfile(path):
        why = "there is something that is not a file: name a file"
    elif not os.access(directory, os.W_OK | os.X_OK):
        why = f"no file can be made in {directory}"
    else:
        return
    raise UsageError(f"--timeline-filename ({name}): cannot write {path}: {why}")


def _say_nothing(_: str) -> None:
    pass
