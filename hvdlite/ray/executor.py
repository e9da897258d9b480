"""
`RayExecutor`: starts ranks as Ray's actors, and calls functions in all of them. Its methods are Horovod's.

    executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
    executor.start()
    losses = executor.run(train, kwargs={"epochs": 10})
    executor.shutdown()

    start ── a placement group ── an actor per rank ── each takes its place ── run ── the function calls hvd.init()
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import CommunicationError
from ..runtime.world import shutdown
from ..values import seconds, shown, whole_number
from .places import RayPlace, import_ray, in_order_of_ranks, own_facts, places_of, start_store, take

_ray = import_ray("ray")
_errors = import_ray("ray.exceptions")
_placement_groups = import_ray("ray.util.placement_group")
_scheduling = import_ray("ray.util.scheduling_strategies")

# How long the other ranks are given to fail too once one has, so that the error raised is the cause.
_CAUSE_S = 5.0
_LEAVING_S = 5.0


@dataclass(frozen=True)
class ExecutorSettings:
    """How long `RayExecutor.start` waits, in seconds: for workers to start, and for the resources of all of them."""

    timeout_s: float = 30.0
    placement_group_timeout_s: float = 100.0


class _RankActor:
    def __init__(self, prepare: Callable[[], object] | None) -> None:
        self._name = "hvdlite"
        self._executable: Any = None
        if prepare is not None:
            prepare()

    def __repr__(self) -> str:
        return self._name  # Ray puts it before each line of output, and into errors

    def apply(self, fn: Callable[[], Any]) -> Any:
        return fn()

    def take(self, place: RayPlace, store: Any) -> None:
        self._name = f"rank {place.placement.rank}"
        take(place, store)

    def make(self, executable_cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._executable = executable_cls(*args, **kwargs)

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return fn(*args, **kwargs)
        except BaseException:
            # This process lives on, so that no other rank would notice.
            shutdown()
            raise

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        return self.call(fn, (self._executable,), {})


class RayExecutor:
    """Ranks as actors of Ray, which live from `start` to `shutdown`.

    Exactly one of these is given: ``num_workers``, for ranks on any nodes, as few as possible; or ``num_hosts``, for
    ``num_workers_per_host`` ranks on each of so many nodes. Each rank gets ``cpus_per_worker`` CPUs of Ray's, and with
    ``use_gpu`` also ``gpus_per_worker`` GPUs (1 by default); its own GPU is ``torch.device("cuda", hvd.local_rank())``.

    ``use_current_placement_group``: within a placement group, as in a trial of Ray Tune, take its resources. Otherwise
    `start` makes a placement group, which `shutdown` removes.

    Arguments of elastic jobs (``min_workers``, ``max_workers``, ``reset_limit``, ``cooldown_range``) are refused with a
    ValueError: the number of ranks is fixed. ``elastic_timeout`` and ``override_discovery`` have a meaning with these
    alone.
    """

    def __init__(
        self,
        settings: ExecutorSettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        if any(given is not None for given in (min_workers, max_workers, reset_limit, cooldown_range)):
            raise ValueError(
                "RayExecutor(min_workers, max_workers, reset_limit, cooldown_range): the number of ranks is fixed: "
                "pass num_workers, or use hvdlite-run --min-np for an elastic job"
            )
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("RayExecutor: pass either num_workers or num_hosts, with num_workers_per_host")
        if gpus_per_worker is not None and not use_gpu:
            raise ValueError(f"RayExecutor(gpus_per_worker={shown(gpus_per_worker)}) needs use_gpu=True")
        self._settings = settings or ExecutorSettings()
        self._use_current_group = use_current_placement_group
        self._per_worker = {"CPU": _at_least(0, cpus_per_worker, "cpus_per_worker")}
        if use_gpu:
            gpus = 1 if gpus_per_worker is None else gpus_per_worker
            self._per_worker["GPU"] = _at_least(1, gpus, "gpus_per_worker")
        if num_hosts is None:
            self._bundles = _at_least(1, num_workers, "num_workers")
            self._per_bundle, self._strategy = 1, "PACK"
        else:
            self._bundles = _at_least(1, num_hosts, "num_hosts")
            self._per_bundle = _at_least(1, num_workers_per_host, "num_workers_per_host")
            self._strategy = "STRICT_SPREAD"
        self._workers: list[Any] = []
        self._store: Any = None
        self._own_group: Any = None

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> ExecutorSettings:
        """Returns settings for the constructor. Arguments of ssh and ``nics`` are refused."""
        if any(given is not None for given in (ssh_identity_file, ssh_str, nics)):
            raise ValueError(
                "create_settings(ssh_identity_file, ssh_str, nics): leave them out: Ray starts the workers without "
                "ssh, and GLOO_SOCKET_IFNAME in start(extra_env_vars=...) names an interface other than Ray's"
            )
        return ExecutorSettings(
            seconds(timeout_s, "timeout_s"), seconds(placement_group_timeout_s, "placement_group_timeout_s")
        )

    @property
    def num_workers(self) -> int:
        """The number of ranks."""
        return self._bundles * self._per_bundle

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the ranks; each makes ``executable_cls(*executable_args, **executable_kwargs)``, if that is given.

        ``extra_env_vars`` are set in each worker before its Python starts. Raises a TimeoutError that names the
        resources if Ray does not have them within ``placement_group_timeout_s``.
        """
        if self._workers:
            raise RuntimeError("RayExecutor.start() was called before: call shutdown() first")
        try:
            self._start_workers(extra_env_vars)
            if executable_cls is not None:
                arguments = (executable_cls, executable_args or (), executable_kwargs or {})
                _results([worker.make.remote(*arguments) for worker in self._workers])
        except BaseException:
            self.shutdown()
            raise

    def _start_workers(self, extra_env_vars: Mapping[str, str] | None) -> None:
        environment = {"runtime_env": {"env_vars": dict(extra_env_vars)}} if extra_env_vars else {}
        options = {"num_cpus": self._per_worker["CPU"], "num_gpus": self._per_worker.get("GPU", 0), **environment}
        # Where this program runs under the shim of Horovod, so do its workers.
        prepare = getattr(sys.modules.get("hvdlite.horovod"), "install", None)
        actor = _ray.remote(_RankActor)
        given = _placement_groups.get_current_placement_group() if self._use_current_group else None
        group = given or self._make_group()
        for number in range(self.num_workers):
            bundle = -1 if given else number // self._per_bundle
            where = _scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            self._workers.append(actor.options(scheduling_strategy=where, **options).remote(prepare))
        timeout_s = self._settings.timeout_s
        try:
            facts = _ray.get([worker.apply.remote(own_facts) for worker in self._workers], timeout=timeout_s)
        except _errors.GetTimeoutError:
            raise TimeoutError(
                f"RayExecutor.start(): not all of {self.num_workers} workers have started within "
                f"timeout_s={timeout_s:g}: pass a longer one to create_settings(), or see "
                "`ray status` for what they wait for"
            ) from None
        order = in_order_of_ranks(facts)
        self._workers = [self._workers[number] for number in order]
        self._store = start_store()
        places = places_of([facts[number] for number in order], secrets.token_hex(16))
        pairs = zip(self._workers, places, strict=True)
        _ray.get([worker.take.remote(place, self._store) for worker, place in pairs])

    def _make_group(self) -> Any:
        bundle: dict[str, float] = {name: count * self._per_bundle for name, count in self._per_worker.items() if count}
        group = _placement_groups.placement_group([bundle or {"CPU": 0.001}] * self._bundles, strategy=self._strategy)
        self._own_group = group
        timeout_s = self._settings.placement_group_timeout_s
        if not group.wait(timeout_s):
            raise TimeoutError(
                f"RayExecutor.start(): Ray has not found {self._bundles} times {bundle}"
                f"{' on different nodes' if self._strategy == 'STRICT_SPREAD' else ''} within "
                f"placement_group_timeout_s={timeout_s:g}: its cluster has {_ray.cluster_resources()}, and of these "
                f"{_ray.available_resources()} are free"
            )
        return group

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Calls ``fn(*args, **kwargs)`` in all ranks at once, and returns what it returned, in the order of the ranks.

        Raises the error of the first rank that failed: one that is no consequence of another rank's end, if there is.
        """
        return _results(self.run_remote(fn, args, kwargs, callbacks))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Like `run`, but does not wait: returns an ``ObjectRef`` of Ray's for each rank."""
        _refuse(callbacks)
        return [worker.call.remote(fn, args or (), kwargs or {}) for worker in self._all_workers()]

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None) -> list[Any]:
        """Calls ``fn(executable)`` in all ranks, with the object that `start` made there; returns as `run` does."""
        _refuse(callbacks)
        return _results([worker.execute.remote(fn) for worker in self._all_workers()])

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls ``fn(executable)`` in rank 0 alone, and returns what it returned."""
        return _ray.get(self._all_workers()[0].execute.remote(fn))

    def shutdown(self) -> None:
        """Ends the ranks, and removes the placement group if `start` made it. Then `start` may be called again."""
        workers, self._workers = self._workers, []
        if workers:
            with suppress(_errors.RayError):
                # Ranks in the middle of a function do not answer; they are killed as they are.
                _ray.wait(
                    [worker.apply.remote(shutdown) for worker in workers], num_returns=len(workers), timeout=_LEAVING_S
                )
        for worker in workers:
            _ray.kill(worker)
        if self._store is not None:
            _ray.kill(self._store)
        self._store = None
        if self._own_group is not None:
            _placement_groups.remove_placement_group(self._own_group)
        self._own_group = None

    def _all_workers(self) -> list[Any]:
        if not self._workers:
            raise RuntimeError("RayExecutor: call start() first")
        return self._workers


def _results(refs: Sequence[Any]) -> list[Any]:
    left, consequence = list(refs), None
    while left:
        done, left = _ray.wait(left, timeout=None if consequence is None else _CAUSE_S)
        if not done:
            break
        try:
            _ray.get(done)
        except CommunicationError as error:
            consequence = consequence or error
    if consequence is not None:
        raise consequence
    return list(_ray.get(list(refs)))


def _at_least(least: int, given: Any, name: str) -> int:
    number = whole_number(given)
    if number is None or number < least:
        raise ValueError(f"RayExecutor({name}={shown(given)}) is not a whole number from {least} on")
    return number


def _refuse(callbacks: Sequence[Callable[..., Any]] | None) -> None:
    if callbacks:
        raise ValueError("RayExecutor: callbacks are not supported: return what they need, or use ray.util.queue.Queue")
