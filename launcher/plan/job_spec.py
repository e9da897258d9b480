"""`JobSpec`: a job as the command line describes it, and whether it is elastic, or restarted after a failure.

`cli.hvdlite_run` makes it and `job.launch` runs it; `elastic.membership` follows the policy of an elastic job. After a
failure that does what its `OnFailure` says. A new answer to a failure is a class derived from it, and an entry of
`ON_FAILURE`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from .chaos_spec import ChaosSpec
from .hosts import Host
from .ssh import Ssh
from .worker_environment import WorkerEnvironment

Action = TypeVar("Action")
"""What `elastic.membership` carries out."""


@dataclass(frozen=True)
class Responses(Generic[Action]):
    """What an `OnFailure` can have done about one failure. Each returns the actions that do it."""

    end_job: Callable[[], Iterable[Action]]
    bar_host: Callable[[], Iterable[Action]]
    tell_of_empty_slot: Callable[[], Iterable[Action]]


class OnFailure(ABC):
    """What an elastic job does after a worker has failed. It has no state."""

    name: ClassVar[str]
    goes_on: ClassVar[bool] = True
    """Whether the job goes on with the other workers."""
    refills: ClassVar[bool] = True
    """Whether a worker may be started in the slot of one that has failed."""
    replaces: ClassVar[bool] = False
    """Whether that is done at once, so that the job has as many workers again."""

    @abstractmethod
    def after_failure(self, responses: Responses[Action]) -> Iterable[Action]:
        """Returns the actions after a worker has failed."""

    def after_lost_host(self, responses: Responses[Action]) -> Iterable[Action]:
        """Returns the actions after a host with workers was lost."""
        return responses.bar_host()

    @abstractmethod
    def words(self, policy: Policy) -> str:
        """Returns what --dry-run says that is done."""

    def words_without_hosts(self, barred: str) -> str | None:
        """Returns what is said if no host is left but those that are ``barred``; None for nothing."""
        return None


class Replace(OnFailure):
    """A new worker takes the slot."""

    name = "replace"
    replaces = True

    def after_failure(self, responses: Responses[Action]) -> Iterable[Action]:
        return responses.tell_of_empty_slot()

    def words(self, policy: Policy) -> str:
        restarts = f"{policy.max_restarts} times within {policy.restart_window_s:g} s at most (--max-restarts)"
        return f"a new worker takes the slot (--on-failure replace), {restarts}"


class Shrink(OnFailure):
    """The others go on, and nobody takes the worker's place."""

    name = "shrink"
    refills = False

    def after_failure(self, responses: Responses[Action]) -> Iterable[Action]:
        return ()

    def words(self, policy: Policy) -> str:
        return "the others go on, and the slot stays empty (--on-failure shrink)"


class Blacklist(OnFailure):
    """The worker's host gets no workers until its cooldown is over."""

    name = "blacklist"

    def after_failure(self, responses: Responses[Action]) -> Iterable[Action]:
        return responses.bar_host()

    def words(self, policy: Policy) -> str:
        how_long = "any more"
        if policy.cooldown_s is not None:
            how_long = "for {:g} s, which doubles up to {:g} s".format(*policy.cooldown_s)
        return f"its host gets no workers {how_long} (--on-failure blacklist)"

    def words_without_hosts(self, barred: str) -> str | None:
        return (
            f"no host is left: after a failure these get no more workers (--on-failure blacklist): {barred}. Where "
            "that is one host, --on-failure replace starts a new worker on it"
        )


class Stop(OnFailure):
    """The job ends, as one that is not elastic."""

    name = "stop"
    goes_on = False

    def after_failure(self, responses: Responses[Action]) -> Iterable[Action]:
        return responses.end_job()

    def after_lost_host(self, responses: Responses[Action]) -> Iterable[Action]:
        return responses.end_job()

    def words(self, policy: Policy) -> str:
        return "the job ends (--on-failure stop)"


ON_FAILURE: dict[str, OnFailure] = {each.name: each for each in (Replace(), Shrink(), Blacklist(), Stop())}
"""The policies of ``--on-failure`` by their names."""


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
    on_failure: OnFailure = ON_FAILURE["replace"]
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


@dataclass(frozen=True)
class JobSpec:
    """A job: its command, hosts and options.

    ``size`` None fills all slots; ``hosts`` may have `AUTO` slots, which only they can count. ``in_python``: the
    command holds arguments for the Python interpreter of each host's agent. ``as_horovod``: ``import horovod``
    finds hvdlite in workers. ``interfaces`` are the network interfaces by the hosts' labels, with "" for all other
    hosts; of several, separated by commas, a host uses the first that it has. ``timestamps``: shown lines begin
    with the time. ``show_ranks`` and ``show_local_ranks``: the ranks whose output is shown; None for all.
    ``record_dir`` is the directory for each worker's output, if it is written to files, and ``report_dir`` the one
    for reports. ``metrics_file`` is the file for Prometheus, ``summary_file`` the one that is written at the end,
    and ``log_json`` the one for output and events. ``watch``: the job is shown live. ``attempt`` counts the
    restarts before. ``elastic`` is None for a job whose ranks stay the same; where a discovery script finds them,
    ``hosts`` is empty. ``restart`` is None for a job that ends with its first failure.
    """

    hosts: tuple[Host, ...]
    size: int | None
    command: tuple[str, ...]
    cwd: str
    environment: WorkerEnvironment
    grace_s: float
    start_timeout_s: float
    ssh: Ssh = field(default_factory=Ssh)
    interfaces: Mapping[str, str] = field(default_factory=dict)
    verbose: bool = False
    timestamps: bool = False
    show_ranks: frozenset[int] | None = None
    show_local_ranks: frozenset[int] | None = None
    record_dir: str | None = None
    report_dir: str | None = None
    metrics_file: str | None = None
    summary_file: str | None = None
    log_json: str | None = None
    watch: bool = False
    attempt: int = 0
    in_python: bool = False
    as_horovod: bool = False
    elastic: ElasticSpec | None = None
    restart: RestartSpec | None = None

    def interface_of(self, host: Host) -> str | None:
        """Returns the network interface that the user chose for a host; None if its routes decide."""
        named = (self.interfaces.get(name) for name in (host.label, host.name, ""))
        return next(filter(None, named), None)
