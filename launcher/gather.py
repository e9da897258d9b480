"""Until every host's agent has said hello: all are waited for together, and each that fails is told at once.

What follows is decided in `supervise`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from queue import Empty, SimpleQueue

from .errors import LauncherError
from .messages import AgentSaid, Answered, Event, Hello, Interrupted, Lost
from .report import signal_name


class SignalledError(LauncherError):
    """The launcher was signalled before anything was started."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"{signal_name(signum)} before the job was started")
        self.exit_code = 128 + signum


def gather(
    hosts: Collection[str],
    events: SimpleQueue[Event],
    *,
    timeout_s: float,
    say: Callable[[str], object],
    log: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Hello]:
    """The answers by the hosts' labels, or a `LauncherError` once all have answered, failed or run out of time."""
    give_up_at = clock() + timeout_s
    waiting = set(hosts)
    hellos: dict[str, Hello] = {}
    failures: dict[str, str] = {}

    def fail(host: str, why: str) -> None:
        waiting.discard(host)
        failures[host] = why
        if len(hosts) > 1:
            say(f"{host}: {why}")

    while waiting:
        try:
            event = events.get(timeout=max(0.0, give_up_at - clock()))
        except Empty:
            for host in sorted(waiting):
                fail(host, f"no answer within {timeout_s:g} s; --start-timeout gives it more")
            break
        match event:
            case Answered():
                log(
                    f"{event.host} answers, at {event.hello.address}"
                    if event.hello.address
                    else f"{event.host} answers"
                )
                waiting.discard(event.host)
                hellos[event.host] = event.hello
            case Lost(host, why):
                hellos.pop(host, None)  # it may have answered, and not lived to see the others do
                fail(host, why)
            case AgentSaid():
                log(f"{event.host}: {event.text.rstrip()}")
            case Interrupted(signum):
                raise SignalledError(signum)
            case _:
                raise AssertionError(f"before anything was started: {event}")
    if len(hosts) == 1 and failures:
        ((host, why),) = failures.items()
        raise LauncherError(f"{host}: {why}")
    if failures:
        others = f"; {', '.join(hellos)} answered" if hellos else ""
        raise LauncherError(f"nothing was started, since these hosts failed: {', '.join(failures)}{others}")
    return hellos
