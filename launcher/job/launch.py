"""Runs one job from its plan to its outcome: connects to the hosts, starts the workers, supervises and cleans up."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from hvdlite_wire.job_contract import ASKS

from ..agents.agent_group import AGENT_S, Agents
from ..elastic.discovery import Discovery
from ..elastic.elastic_hosts import ElasticHosts
from ..elastic.elastic_job import ElasticJob
from ..elastic.job_faults import JobFaults, asked_fault
from ..elastic.membership import REST_S, Membership
from ..errors import UsageError
from ..plan.hosts import AUTO, Host, Slot, count_auto_slots, each_once, plan_slots
from ..plan.job_spec import JobSpec
from ..protocol.messages import Event, HostsFound, Interrupted, ReportAsked, ScreenDone, UserSignal
from ..screen.display import draws_in_place
from ..screen.job_screen import Screen, shown_by_rank, shown_by_slots
from ..screen.output_records import JsonLog, LogEvents, OutputFiles
from ..status.console import Console
from ..status.first_minute import FirstMinute
from ..status.job_facts import GenerationTable, JobFacts
from ..status.live_view import EACH_S as WATCH_EACH_S
from ..status.live_view import LiveView, Watch, make_view
from ..status.metrics import METRICS_EACH_S, Metrics
from ..status.progress import JobProgress
from ..status.reports import Reports
from ..status.summary import PAGE, History, summary_data, summary_page
from ..store.server import Store
from ..system import process_tree
from ..system.process_tree import signals_as_bytes
from ..system.terminal_text import say
from ..system.user_files import require_directory, require_writable, write_json, write_text
from ..workers.ending import Ending, Observer, Roster
from ..workers.failure_message import JobOutcome
from ..workers.first_failure import FirstFailure
from .supervisor import Judgement, Stdin, Supervisor, echoes

Made = TypeVar("Made")

_FOR_WORKERS = (signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *_FOR_WORKERS)
# Where the user waits for the end: how long an agent may take to end all processes, and the screen to write the rest.
_HASTY_AGENT_S, _HASTY_SCREEN_S = 2.0, 1.0


def launch(job: JobSpec, store: Store | None = None) -> JobOutcome:
    """Runs a job and returns its outcome.

    ``store`` is the workers' rendezvous store, for a caller that exchanges values with them. Then the message about a
    failure is not shown, since the caller reports it.

    This process adopts orphans of the job and handles SIGINT, SIGTERM and SIGHUP during the call: it must have no other
    children, and must call this from its main thread.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    process_tree.adopt_orphans()
    # Errors of the command line are reported before any host is contacted.
    if job.hosts and job.hosts[0].is_here:  # where rank 0 is, which writes the timeline
        _require_timeline(job.environment.here, job.cwd)
    if job.attempt == 0:  # a restart must not fail because of a directory that has gone meanwhile
        _require_files(job)
    view = make_view(say) if job.watch and draws_in_place() else None
    json_log = None
    if (log_file := job.log_json) is not None:
        json_log = _or_without(job, lambda: JsonLog(log_file, is_continued=job.attempt > 0), "it")
    shared = Store() if store is None else store
    with signals_as_events(events), Agents(job, events, shared) as agents, contextlib.ExitStack() as to_close:
        if job.elastic is None:
            running = _start_static(job, events, agents, json_log)
        else:
            running = _start_elastic(job, events, agents, shared, to_close, json_log)
        screen, ending = running.screen, running.ending

        def send_input(worker: int, data: bytes) -> None:
            if data.endswith(b"\n") and echoes():
                screen.typed()
            agents.feed(worker, data)

        started_at = time.time()

        def about() -> dict[str, object]:
            # A snapshot in one step, since the supervisor's thread changes the set meanwhile.
            workers = sorted(ending.running.copy())
            hosts = ending.roster.hosts_of(workers)
            return {"started_at": started_at, "workers": len(workers), "hosts": hosts, "command": job.command}

        to_close.enter_context(Console(events.put, about))
        reports = Reports(ending, agents.ask_status, directory=job.report_dir, ended=running.ended_ranks)
        views = _Views(job, running, agents, view)
        observers = [*running.observers, *views.observers]
        if isinstance(running.judgement, FirstFailure):
            running.judgement.warn_with(reports.on_late_start)
        supervisor = Supervisor(
            running.judgement,
            ending,
            reports,
            send_input=send_input,
            stdin=Stdin(events),
            screen=screen,
            observers=observers,
        )
        outcome = supervisor.run(events)
        views.end(outcome)
        to_close.close()
        agents.end(timeout_s=_HASTY_AGENT_S if outcome.hasty else AGENT_S)
        ending.log("no process of the job is left")
        screen.show_held()
        if report := running.report():
            screen.say(report)
        if outcome.exit_code == 0 and (warning := views.facts.warning()):
            screen.say(warning)
        if outcome.message and store is None:
            screen.say(outcome.message)
        screen.close()
        return replace(outcome, hasty=_wait_for_screen(screen, events, is_hasty=outcome.hasty))


@dataclass(frozen=True)
class _Running:
    """The parts of a job that has been started. ``report`` returns what is told at its end besides the outcome."""

    screen: Screen
    ending: Ending
    judgement: Judgement
    report: Callable[[], str]
    table: GenerationTable | None = None
    observers: Sequence[Observer] = ()
    ranks: Mapping[int, int] = field(default_factory=dict)
    """The rank of each worker, by its number; none in an elastic job: those that it has lost are no ranks any more."""

    def ended_ranks(self) -> list[int]:
        running = self.ending.running.copy()
        return [rank for worker, rank in self.ranks.items() if worker not in running]


class _Views:
    """What people and machines see of a running job besides its output. ``observers`` are told of all events."""

    def __init__(self, job: JobSpec, running: _Running, agents: Agents, view: LiveView | None) -> None:
        """``view`` draws the job for ``--watch``; None if nothing can be drawn in place."""
        screen, ending = running.screen, running.ending
        self._job = job
        self._screen = screen
        self._metrics: Metrics | None = None
        self.observers: list[Observer] = []
        if screen.has_status:
            self.observers.append(FirstMinute(ending, screen.set_status))
        if job.log_json is not None:
            self.observers.append(LogEvents(ending.roster, screen.record))
        is_asked = job.metrics_file is not None or job.summary_file is not None
        has_page = job.summary_file is not None and job.summary_file.endswith(PAGE)
        each_s = WATCH_EACH_S if job.watch or has_page else METRICS_EACH_S if is_asked else None
        progress = JobProgress(ending, agents.ask_status, each_s=each_s)
        facts = self.facts = JobFacts(ending, progress, running.table)
        self._history = History(facts) if has_page else None
        if self._history is not None:
            progress.show_with(self._history.note)
        watch = Watch(facts, job.command)
        self.observers += [progress, facts, watch]
        if view is not None:
            watch.draw_with(view, screen.set_view)
        elif job.watch:
            watch.tell_with(screen.say)
        if job.metrics_file is not None:
            self._metrics = Metrics(job.metrics_file, facts, screen.say)
            progress.show_with(self._metrics.show)

    def end(self, outcome: JobOutcome) -> None:
        """Writes the last state of all files."""
        self._screen.record("ended", exit_code=outcome.exit_code, why=outcome.message)
        if self._metrics is not None:
            self._metrics.write(is_up=False, exit_code=outcome.exit_code)
        if self._job.summary_file is not None:
            data = summary_data(self.facts, outcome, self._job.command, self._job.attempt)
            if self._history is None:
                write_json("--summary", self._job.summary_file, data, self._screen.say)
            else:
                page = summary_page(data, self._history.moments)
                write_text("--summary", self._job.summary_file, page, self._screen.say)


def _start_static(job: JobSpec, events: SimpleQueue[Event], agents: Agents, json_log: JsonLog | None) -> _Running:
    """Starts all workers of a job whose ranks stay the same."""
    slots = None if any(host.slots == AUTO for host in job.hosts) else plan_slots(job.hosts, job.size)
    files = None if slots is None else _output_files(job, slots)
    hosts = job.hosts if slots is None else tuple(dict.fromkeys(slot.host for slot in slots))
    hellos = agents.connect(hosts)
    machines = each_once(hosts, lambda host: hellos[host.label].machine or host.label)
    if slots is None or len(machines) < len(hosts):
        slots = plan_slots(count_auto_slots(machines, lambda host: hellos[host.label].slots or 1), job.size)
    files = files or _output_files(job, slots)
    workers = {slot.number: slot for slot in slots}
    screen = Screen(
        events,
        agents.output_shown,
        timestamps=job.timestamps,
        shows=shown_by_slots(job, slots),
        records=[each for each in (files, json_log) if each is not None],
        rank_of=lambda number: workers[number].rank,
    )
    ending = _ending(job, agents, screen)
    if len(machines) < len(hosts):
        names = ", ".join(host.label for host in hosts if host.label not in {one.label for one in machines})
        screen.say(f"these names belong to hosts that are already listed; their slots are added there: {names}")
    for slot in slots:
        ending.log(f"rank {slot.rank}: {slot.host.label}, local rank {slot.local_rank} of {slot.local_size}")
        ending.roster.add(slot.number, slot.host.label, slot.rank)
    agents.start(slots, hellos)
    ending.running.update(workers)
    judgement = FirstFailure(workers, ending, start_timeout_s=job.start_timeout_s)
    ranks = {number: slot.rank for number, slot in workers.items()}
    return _Running(screen, ending, judgement, report=str, ranks=ranks)


def _start_elastic(
    job: JobSpec,
    events: SimpleQueue[Event],
    agents: Agents,
    store: Store,
    to_close: contextlib.ExitStack,
    json_log: JsonLog | None,
) -> _Running:
    """Begins to look for the hosts of an elastic job, which get workers when they are found."""
    assert job.elastic is not None, "the caller has asked"
    # There will be a worker 0: that its files cannot be written is reported before it is started.
    files = None if job.record_dir is None else OutputFiles(job.record_dir, {}, first=0)
    screen = Screen(
        events,
        agents.output_shown,
        timestamps=job.timestamps,
        shows=shown_by_rank(job),
        records=[each for each in (files, json_log) if each is not None],
        rank_of=lambda _: None,
    )
    ending = _ending(job, agents, screen)
    hosts = ElasticHosts(agents, start_timeout_s=job.start_timeout_s, say=screen.say)
    membership, chaos = Membership(job.elastic.policy, random.random, REST_S), job.elastic.chaos
    faults = None if chaos is None else JobFaults(chaos, membership, ending, store=store, hosts=agents)
    judgement = ElasticJob(
        membership,
        hosts,
        ending,
        store=store,
        screen=screen,
        hang_timeout_s=job.elastic.hang_timeout_s,
        post=events.put,
        chaos_of=(lambda _: "") if faults is None else faults.variable_of,
    )
    if job.elastic.discovery is None:
        events.put(HostsFound({host.label: host.slots for host in job.hosts}))
    else:
        to_close.enter_context(Discovery(job.elastic.discovery, events.put, screen.say))
    table = judgement.table
    if chaos is None or faults is None:
        return _Running(screen, ending, judgement, report=table.text, table=table)

    def note(key: bytes, value: bytes) -> None:
        if (asked := asked_fault(key, value)) is not None:
            events.put(asked)

    def report() -> str:
        final = faults.final_report()
        if chaos.report_file is not None:
            write_json("--chaos-report", chaos.report_file, final.data(), screen.say)
        return "\n".join(filter(None, [table.text(), final.text()]))

    store.watch(ASKS, note)
    return _Running(screen, ending, judgement, report, table, observers=(faults,))


def _ending(job: JobSpec, agents: Agents, screen: Screen) -> Ending:
    return Ending(
        Roster(),
        signal_workers=agents.signal,
        say=screen.say,
        log=screen.say if job.verbose else lambda _: None,
        grace=job.grace_s,
        clock=time.monotonic,
    )


def count_slots(job: JobSpec) -> tuple[Host, ...]:
    """Returns the job's hosts, each with its number of slots. Asks the hosts whose slots are `AUTO`."""
    events: SimpleQueue[Event] = SimpleQueue()
    unknown = tuple(host for host in job.hosts if host.slots == AUTO)
    if not unknown:
        return job.hosts
    with signals_as_events(events), Agents(job, events) as agents:
        hellos = agents.connect(unknown)
        return count_auto_slots(job.hosts, lambda host: hellos[host.label].slots or 1)


@contextlib.contextmanager
def signals_as_events(events: SimpleQueue[Event]) -> Iterator[None]:
    """While in this context, `_SIGNALS` become events instead of ending this process."""
    # A script's background job ignores SIGQUIT, but a report does it no harm.
    with signals_as_bytes(_SIGNALS, even_ignored=(signal.SIGQUIT,)) as pipe:
        threading.Thread(target=_pass_signals_on, args=(pipe, events), daemon=True, name="signals").start()
        yield


def _pass_signals_on(pipe: int, events: SimpleQueue[Event]) -> None:
    while received := os.read(pipe, 64):
        now_s = time.monotonic()
        for signum in received:
            if signum == signal.SIGQUIT:
                events.put(ReportAsked())
            elif signum in _FOR_WORKERS:
                events.put(UserSignal(signum))
            elif signum in _SIGNALS:
                events.put(Interrupted(signum, now_s))
    os.close(pipe)


def _wait_for_screen(screen: Screen, events: SimpleQueue[Event], *, is_hasty: bool) -> bool:
    """Waits until all output is written, and returns whether the user waits for that: after a signal.

    Then it takes a moment at most, after which what is left of the output is dropped, and the screen is tidied up.
    """
    is_dropping = False
    while True:
        try:
            event = events.get(timeout=_HASTY_SCREEN_S if is_hasty else None)
        except Empty:
            if is_dropping:  # the terminal takes nothing
                return True
        else:
            if isinstance(event, ScreenDone):
                return is_hasty
            if not isinstance(event, Interrupted):
                continue
            if is_dropping:
                return True
        is_hasty = is_dropping = True
        screen.drop_rest()


def _output_files(job: JobSpec, slots: Sequence[Slot]) -> OutputFiles | None:
    if (directory := job.record_dir) is None:
        return None
    return _or_without(job, lambda: OutputFiles(directory, {slot.number: slot.rank for slot in slots}), "them")


def _or_without(job: JobSpec, make: Callable[[], Made], it: str) -> Made | None:
    """Returns what this makes. A restart goes on without it if it cannot be created again."""
    try:
        return make()
    except UsageError as error:
        if job.attempt == 0:
            raise
        say(f"{error}. The job goes on without {it}")
        return None


def _require_files(job: JobSpec) -> None:
    """Raises `UsageError` if what a flag asks to be written cannot be."""
    chaos = None if job.elastic is None else job.elastic.chaos
    for flag, path in (
        ("--metrics-textfile", job.metrics_file),
        ("--summary", job.summary_file),
        ("--chaos-report", None if chaos is None else chaos.report_file),
    ):
        if path is not None:
            require_writable(flag, path)
    if job.report_dir is not None:
        require_directory("--report-dir", job.report_dir)


def _require_timeline(environ: Mapping[str, str], cwd: str) -> None:
    """Raises `UsageError` if the workers' environment names a timeline file that cannot be written on this machine."""
    name = next((name for name in ("HVDLITE_TIMELINE", "HOROVOD_TIMELINE") if name in environ), None)
    file = "" if name is None else environ[name].strip()
    if not file or file == "DYNAMIC":  # not a file: the program itself starts the timeline
        return
    path = os.path.join(cwd, file)
    # A directory gets a file for each rank.
    require = require_directory if file.endswith("/") or os.path.isdir(path) else require_writable
    require(f"--timeline-filename ({name})", path)
