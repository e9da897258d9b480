"""Waits until the agents of all hosts have answered or failed, and reports each failure at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ..errors import LauncherError
from ..protocol.messages import (
    AgentSaid,
    Answered,
    Event,
    Hello,
    Interrupted,
    LoopFailed,
    Lost,
    NotThereYet,
    ReportAsked,
    UserSignal,
)
from ..system.process_tree import signal_name


class SignalledError(LauncherError):
    """The launcher received a signal while no job was running."""

    def __init__(self, signum: int, when: str = "before the job was started") -> None:
        super().__init__(f"{signal_name(signum)} {when}")
        self.exit_code = 128 + signum


class UnreachableError(LauncherError):
    """The agents on some hosts failed to answer, so nothing was started. ``hosts`` are their labels."""

    def __init__(self, message: str, hosts: Collection[str]) -> None:
        super().__init__(message)
        self.hosts = frozenset(hosts)


@dataclass(frozen=True)
class AgentAnswers:
    """The answer of each host, or the reason why it failed, by its label."""

    hellos: dict[str, Hello] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def all(self) -> dict[str, Hello]:
        """Returns the answers; raises `UnreachableError` if a host failed."""
        if len(self.failures) == 1 and not self.hellos:
            ((host, why),) = self.failures.items()
            raise UnreachableError(f"{host}: {why}", self.failures)
        if self.failures:
            others = f"; {', '.join(self.hellos)} answered" if self.hellos else ""
            raise UnreachableError(
                f"no worker was started, because these hosts failed: {', '.join(self.failures)}{others}", self.failures
            )
        return self.hellos


def wait_for_agents(  # noqa: PLR0912  # one place for the reaction to each event
    hosts: Mapping[str, str],
    events: SimpleQueue[Event],
    *,
    timeout_s: float,
    say: Callable[[str], object],
    log: Callable[[str], object],
    on_missing: Callable[[Collection[str]], object] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> AgentAnswers:
    """Returns the result for each host, once all have answered, failed or run out of time.

    ``hosts`` maps their labels to a command that a user can run to see whether the host can be reached. A host that is
    not there yet is told once; it counts as failed when the time is over, or when another host has failed and all that
    have not answered are not there. ``on_missing`` is called with the labels of those that have not answered, again and
    again.
    """
    give_up_at = clock() + timeout_s
    waiting = set(hosts)
    greeted = AgentAnswers()
    not_there: dict[str, str] = {}

    def fail(host: str, why: str) -> None:
        waiting.discard(host)
        greeted.failures[host] = why
        if len(hosts) > 1:
            say(f"{host}: {why}")

    while waiting:
        on_missing(waiting)
        if greeted.failures and waiting <= not_there.keys():  # nothing will be started, so it is in vain to wait
            for host in sorted(waiting):
                fail(host, not_there[host])
            break
        try:
            event = events.get(timeout=max(0.0, give_up_at - clock()))
        except Empty:
            for host in sorted(waiting):
                late = f"no answer within {timeout_s:g} s: try {hosts[host]}, or allow more time with --start-timeout"
                fail(host, still_not_there(not_there[host], timeout_s) if host in not_there else late)
            break
        match event:
            case Answered():
                log(f"{event.host} answers" + (f", at {event.hello.address}" if event.hello.address else ""))
                waiting.discard(event.host)
                greeted.hellos[event.host] = event.hello
            case Lost(host, why):
                greeted.hellos.pop(host, None)  # it may have answered, and ended before the others answered
                fail(host, why)
            case LoopFailed():
                raise LauncherError(str(event))
            case NotThereYet(host, cause, why):
                if host not in not_there:
                    say(not_there_yet(host, cause, timeout_s))
                not_there[host] = why
            case AgentSaid():
                log(f"{event.host}: {event.text.rstrip()}")
            case Interrupted(signum):
                raise SignalledError(signum)
            case ReportAsked() | UserSignal():
                say(f"no worker is started yet: waiting for {', '.join(sorted(waiting))}")
            case _:
                raise AssertionError(f"before anything was started: {event}")
    return greeted


def not_there_yet(host: str, cause: str, timeout_s: float) -> str:
    """Returns what is told of a host that cannot be connected to yet."""
    return f"waiting for {host}: {cause}; trying again until {timeout_s:g} s are over (--start-timeout)"


def still_not_there(why: str, timeout_s: float) -> str:
    """Returns the reason why a host is given up that was not there within the time."""
    return f"{why}. It was tried again for {timeout_s:g} s; --start-timeout allows more"
