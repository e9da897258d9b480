"""The settings of an elastic job, and of one that is restarted after a failure, as plain values.

`cli.elastic_flags` makes them for a `JobSpec`; `elastic.membership` follows the policy, `elastic.discovery` runs the
script.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .chaos_spec import ChaosSpec


class OnFailure(Enum):
    """What an elastic job does after a worker has failed: see `Membership._count_failure`."""

    REPLACE = "replace"  # a new worker takes its slot at once
    SHRINK = "shrink"  # the others go on, and its slot stays empty
    BLACKLIST = "blacklist"  # its host gets no workers until its cooldown is over
    STOP = "stop"  # the job ends, as one that is not elastic


@dataclass(frozen=True)
class Policy:
    """The rules of an elastic job's membership.

    ``start_np`` is how many workers the first generation needs, None for ``min_np``. ``max_np`` None: as many as there
    are slots. ``spares`` workers more than ``max_np`` are started, and wait for a place.

    ``cooldown_s`` is for how long a host gets no workers after its first failure, and at most; None: for ever.

    ``max_restarts`` of one slot are made within ``restart_window_s``; then it stays empty for a while. ``reset_limit``
    is how many generations may follow the first; None: any number.
    """

    min_np: int
    max_np: int | None = None
    start_np: int | None = None
    spares: int = 0
    on_failure: OnFailure = OnFailure.REPLACE
    elastic_timeout_s: float = 600.0
    cooldown_s: tuple[float, float] | None = None
    reset_limit: int | None = None
    max_restarts: int = 3
    restart_window_s: float = 300.0

    @property
    def first_np(self) -> int:
        return self.min_np if self.start_np is None else self.start_np


@dataclass(frozen=True)
class DiscoveryScript:
    """A program that prints a line for each host that is there: ``host`` or ``host:slots``.

    ``command`` is for a shell in the directory ``cwd``. A line without slots means ``slots_per_host``. It is run every
    ``period_s`` seconds, and may take ``limit_s``.
    """

    command: str
    cwd: str
    slots_per_host: int = 1
    period_s: float = 1.0
    limit_s: float = 10.0


@dataclass(frozen=True)
class ElasticSpec:
    """An elastic job. Its hosts are those that ``discovery`` finds; if that is None, they are `JobSpec.hosts`.

    A worker that others wait for is ended after ``hang_timeout_s`` without a response; 0: never.
    ``chaos`` are the faults that the user wants to happen; None for none. ``forks``: workers that take the places of
    others may be copies of a process that has imported torch.
    """

    policy: Policy
    discovery: DiscoveryScript | None = None
    hang_timeout_s: float = 30.0
    chaos: ChaosSpec | None = None
    forks: bool = True


@dataclass(frozen=True)
class RestartSpec:
    """A job that is not elastic, and is started anew after a failure, at most ``max_restarts`` times.

    It then runs on the hosts that are left, with at least ``min_np`` workers.
    """

    max_restarts: int
    min_np: int
