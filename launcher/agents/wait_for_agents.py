"""Waits until every host's agent has said hello or failed, and tells at once of each that fails.

What follows is decided in `supervisor`, or looked at in `run_check`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ..errors import LauncherError
from ..system.signals import signal_name
from ..wire.messages import AgentSaid, Answered, Event, Hello, Interrupted, Lost


class SignalledError(LauncherError):
    """The launcher was signalled while no job was under way."""

    def __init__(self, signum: int, when: str = "before the job was started") -> None:
        super().__init__(f"{signal_name(signum)} {when}")
        self.exit_code = 128 + signum


@dataclass(frozen=True)
class AgentAnswers:
    """Each host's answer, or why it has none, by its label."""

    hellos: dict[str, Hello] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def all(self) -> dict[str, Hello]:
        """The answers; a `LauncherError` if a host has none."""
        if len(self.failures) == 1 and not self.hellos:
            ((host, why),) = self.failures.items()
            raise LauncherError(f"{host}: {why}")
        if self.failures:
            others = f"; {', '.join(self.hellos)} answered" if self.hellos else ""
            raise LauncherError(f"nothing was started, since these hosts failed: {', '.join(self.failures)}{others}")
        return self.hellos


def wait_for_agents(
    hosts: Mapping[str, str],
    events: SimpleQueue[Event],
    *,
    timeout_s: float,
    say: Callable[[str], object],
    log: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
) -> AgentAnswers:
    """What became of each, once all have answered, failed or run out of time.

    ``hosts`` are their labels, each with what to type to see whether it can be reached at all.
    """
    give_up_at = clock() + timeout_s
    waiting = set(hosts)
    greeted = AgentAnswers()

    def fail(host: str, why: str) -> None:
        waiting.discard(host)
        greeted.failures[host] = why
        if len(hosts) > 1:
            say(f"{host}: {why}")

    while waiting:
        try:
            event = events.get(timeout=max(0.0, give_up_at - clock()))
        except Empty:
            for host in sorted(waiting):
                fail(host, f"no answer within {timeout_s:g} s: try {hosts[host]}, or give it more with --start-timeout")
            break
        match event:
            case Answered():
                log(
                    f"{event.host} answers, at {event.hello.address}"
                    if event.hello.address
                    else f"{event.host} answers"
                )
                waiting.discard(event.host)
                greeted.hellos[event.host] = event.hello
            case Lost(host, why):
                greeted.hellos.pop(host, None)  # it may have answered, and not lived to see the others do
                fail(host, why)
            case AgentSaid():
                log(f"{event.host}: {event.text.rstrip()}")
            case Interrupted(signum):
                raise SignalledError(signum)
            case _:
                raise AssertionError(f"before anything was started: {event}")
    return greeted
