"""
Hierarchical collectives: all-reduces in three steps, within each host, between hosts, and within each host.

    tensor ── reduce-scatter within the host ── shard ── all-reduce between the ranks with the same local rank,
           one on each host ── all-gather within the host ── tensor

A reduce-scatter is one within the host, and then one between hosts. Together the ranks of a host send over the network
only as much data as one rank would, and each sends a share of it. This pays where the network between hosts is slower
than the connections within a host.

`runtime.make_world` calls `choose_levels` for the group of all ranks. When no level is configured, and there are GPUs,
each rank times all-reduces on both engines, and rank 0's medians decide for all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..log import log
from .engine import DelegatingEngine, Done, Engine, EngineFactory, EngineWork, HasMemory, PeerGoneError
from .flat_bytes import pieces_of
from .group import Group

# Smaller tensors take one step, which is faster than three on any network.
LEAST_BYTES = 64 * 2**10

_CLOSING_S = 1.0

# The most memory kept for later shards; the shards of one step's buckets need less.
_MOST_KEPT_BYTES = 256 * 2**20

_TRIAL_BYTES = (2**20, 16 * 2**20)
_WARM_UP, _TRIALS = 2, 5


@dataclass(frozen=True, slots=True)
class HostGroups:
    """One rank's groups, each in the order of ranks.

    ``within`` are the ranks on this rank's host. ``across`` are the ranks with its local rank, one on each host.
    ``hosts`` are the ranks of every host.
    """

    within: tuple[int, ...]
    across: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]


def host_groups_of(rank: int, nodes: Sequence[Hashable]) -> HostGroups | None:
    """Returns the host groups of ``rank``; ``nodes`` are the hosts by rank.

    None where there are no two levels: one host, one rank per host, or hosts with different numbers of ranks.
    """
    members: dict[Hashable, list[int]] = {}
    for other, node in enumerate(nodes):
        members.setdefault(node, []).append(other)
    within = members[nodes[rank]]
    if len(members) == 1 or len(within) == 1 or len({len(ranks) for ranks in members.values()}) > 1:
        return None
    local_rank = within.index(rank)
    hosts = tuple(tuple(ranks) for ranks in members.values())
    return HostGroups(tuple(within), tuple(ranks[local_rank] for ranks in hosts), hosts)


class HierarchicalEngine(DelegatingEngine):
    """Reduces large tensors in two levels, within hosts and between them; all else uses a flat engine.

    16-bit floats are rounded in each step.
    """

    def __init__(
        self,
        flat: Engine,
        scatter: Engine,
        across: Engine,
        gather: Engine,
        host_groups: HostGroups,
        devices: set[str],
    ) -> None:
        """``scatter`` and ``gather`` are between a host's ranks, ``across`` between ranks with the same local rank.

        They must be different, so that the second step of one tensor does not wait for the first of the next.
        ``host_groups`` have ranks of the flat engine. ``devices`` are the types that use two levels, such as ``cuda``.
        """
        super().__init__(flat, scatter, across, gather)
        self.flat, self._scatter, self._across, self._gather = flat, scatter, across, gather
        self._host_groups = host_groups
        self._local_size = len(host_groups.within)
        self.cannot_repeat = flat.cannot_repeat
        self.devices = frozenset(devices)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._shards = _Shards()
        self._step_threads: _StepThreads | None = None

    @property
    def ways(self) -> Mapping[str, tuple[str, ...]]:  # type: ignore[override]  # it depends on `devices`
        within, across = self._scatter.ways, self._across.ways
        levels = {device: within[device] + across[device] for device in self.devices & within.keys() & across.keys()}
        return {**self.flat.ways, **levels}

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self._scatter.zeros(numel, dtype) if isinstance(self._scatter, HasMemory) else None

    def holds(self, tensor: Tensor) -> bool:
        return isinstance(self._scatter, HasMemory) and self._scatter.holds(tensor)

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork:
        (tensor,) = tensors
        self._state.require_open()
        if not self._takes(tensor):
            return self.flat.allreduce(tensors, opts)
        return self._run(self._allreduce_steps(tensor.view(-1), opts), tensor)

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        self._state.require_open()
        if not self._takes(input):
            return self.flat.reduce_scatter_base(output, input, counts, opts)
        return self._run(self._reduce_scatter_steps(output, input, counts, opts), input)

    def _allreduce_steps(self, whole: Tensor, opts: dist.AllreduceOptions) -> _Steps:
        even = whole.numel() - whole.numel() % self._local_size
        main, shard = whole[:even], self._shards.take(even // self._local_size, whole)
        # The flat engine reduces the few elements that do not divide by the local size, at the same time.
        rest = self.flat.allreduce([whole[even:]], opts) if even < whole.numel() else None
        options = dist.ReduceScatterOptions()
        options.reduceOp = opts.reduceOp
        within = self._scatter.reduce_scatter_base(shard, main, [shard.numel()] * self._local_size, options)
        yield within
        within.wait()
        across = self._across.allreduce([shard], opts)
        yield across
        across.wait()
        if rest is not None:
            rest.wait()
        yield self._gather.allgather_base(main, shard)
        self._shards.give_back(shard)

    def _reduce_scatter_steps(
        self, output: Tensor, input: Tensor, counts: Sequence[int], opts: dist.ReduceScatterOptions
    ) -> _Steps:
        # The first step gives each rank the parts of all ranks with its local rank, and the second leaves its own part.
        columns = list(zip(*self._host_groups.hosts, strict=True))
        parts = pieces_of(input, counts)
        sent = torch.cat([parts[rank] for column in columns for rank in column])
        counts_across = [counts[rank] for rank in self._host_groups.across]
        shard = self._shards.take(sum(counts_across), input)
        counts_within = [sum(counts[rank] for rank in column) for column in columns]
        within = self._scatter.reduce_scatter_base(shard, sent, counts_within, opts)
        yield within
        within.wait()
        across = self._across.reduce_scatter_base(output, shard, counts_across, opts)
        yield across
        yield across
        self._shards.give_back(shard)

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.device.type in self.devices and tensor.numel() * tensor.element_size() >= LEAST_BYTES

    def _run(self, steps: _Steps, tensor: Tensor) -> EngineWork:
        next(steps)
        if tensor.is_cuda:
            # Waits of a CUDA engine block the current stream: make that this engine's own stream, not the program's.
            with torch.cuda.stream(self._stream(tensor.device)):
                next(steps)
                return _Holding(next(steps), steps)
        if self._step_threads is None:
            self._step_threads = _StepThreads(self._host_groups.within)
        return self._step_threads.run(steps)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own is untyped
        return self._streams[device]

    def quiesce(self, reason: str, /) -> None:
        self._state.quiesce(reason)
        if self._step_threads is not None:
            self._step_threads.wait_until_idle()
        super().quiesce(reason)

    def close(self) -> None:
        self.close_levels()
        self.flat.close()

    def close_levels(self) -> None:
        """Close all engines but the flat one, after the threads that carry on the steps."""
        if self._step_threads is not None:
            self._step_threads.close()
            self._step_threads = None
        for part in (self._scatter, self._across, self._gather):
            part.close()


_Steps: TypeAlias = Iterator[EngineWork]
"""The three steps of one tensor's collective, each yielded once it has begun; the end of the last is that of all.

To go on is to wait for the step before, and at the end to release memory. The iterator keeps what the steps use.
"""


class _Shards:
    """A pool of CPU memory for shards, since fresh pages cost as much as copying them; for GPUs PyTorch has one.

    It never has more pieces than shards were in use at once.
    """

    def __init__(self) -> None:
        # Flat byte tensors, in ascending order of size.
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, numel: int, like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            return like.new_empty(numel)
        nbytes = numel * like.element_size()
        with self._lock:
            at = bisect_left(self._free, nbytes, key=torch.numel)
            # Drop a piece that is too small: a larger one replaces it.
            memory = self._free.pop(min(at, len(self._free) - 1)) if self._free else None
        if memory is None or memory.numel() < nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return memory[:nbytes].view(like.dtype)

    def give_back(self, shard: Tensor) -> None:
        if shard.device.type != "cpu":
            return
        memory = shard.view(torch.uint8).as_strided((shard.untyped_storage().nbytes(),), (1,))
        with self._lock:
            if sum(map(torch.numel, self._free)) + memory.numel() <= _MOST_KEPT_BYTES:
                insort(self._free, memory, key=torch.numel)


@dataclass(slots=True, eq=False)
class _Holding:
    """A CUDA engine's work that keeps ``memory`` as long as itself."""

    work: EngineWork
    memory: object

    def wait(self) -> object:
        return self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.work.get_future()


class _StepThreads:
    """Carries tensors from step to step on two threads: one waits for the first two, and the other for the third.

    So the program may be busy elsewhere, and the network does not wait for the third step.
    """

    def __init__(self, within: Sequence[int]) -> None:
        """``within`` are this host's ranks in the flat engine; the host's engine numbers ranks by their index in it."""
        self._within = within
        self._scattered: SimpleQueue[_QueuedSteps | None] = SimpleQueue()
        self._crossed: SimpleQueue[_QueuedSteps | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name="hvdlite hierarchy", daemon=True) for run in (self._cross, self._gather)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, steps: _Steps) -> EngineWork:
        """Queues the remaining steps; the first has begun."""
        done: torch.futures.Future[None] = torch.futures.Future()
        self._scattered.put((steps, done))
        return _StepsWork(done)

    def wait_until_idle(self) -> None:
        self.run(iter([Done(), Done()])).wait()

    def close(self) -> None:
        """Ends the threads; waits for at most a second each, since one may be blocked because a rank has crashed."""
        self._scattered.put(None)
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _cross(self) -> None:
        while (item := self._scattered.get()) is not None:
            with self._failing(item[1]):
                next(item[0])
                self._crossed.put(item)
            del item  # it would keep the engines and memory alive until the next one
        self._crossed.put(None)

    def _gather(self) -> None:
        while (item := self._crossed.get()) is not None:
            with self._failing(item[1]):
                next(item[0]).wait()
                next(item[0], None)
                item[1].set_result(None)
            del item

    @contextlib.contextmanager
    def _failing(self, done: torch.futures.Future[None]) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the waiting thread gets it, whatever it is
            if isinstance(error, PeerGoneError):
                error = PeerGoneError(str(error), self._within[error.group_rank])
            done.set_exception(error)  # type: ignore[arg-type]  # torch's stub asks for a result


_QueuedSteps: TypeAlias = tuple[_Steps, "torch.futures.Future[None]"]


@dataclass(slots=True, eq=False)
class _StepsWork:
    """A collective whose steps `_StepThreads` runs; ``done`` is set after the last."""

    done: torch.futures.Future[None]

    def wait(self) -> object:
        return self.done.wait()

    def is_completed(self) -> bool:
        return self.done.done()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.done


class HierarchicalEngineFactory:
    """Opens two-level engines between all ranks; `among` gives flat ones for some of the ranks."""

    def __init__(
        self,
        flat: EngineFactory,
        within: EngineFactory | None,
        host_groups: HostGroups,
        rank: int,
        token: str,
        devices: set[str],
    ) -> None:
        """``flat`` is between all ranks, each of which must make one of these, with its own ``host_groups``.

        ``within`` opens the engines between the ranks of this host; by default ``flat`` opens them. ``token`` is equal
        on all ranks and never used before.
        """
        self._flat = flat
        self._host_groups = host_groups
        self._devices = devices
        self._within = within or flat.among(
            host_groups.within, host_groups.within.index(rank), f"{token}.within.{host_groups.within[0]}"
        )
        self._across = flat.among(
            host_groups.across, host_groups.across.index(rank), f"{token}.across.{host_groups.across[0]}"
        )

    def open(self) -> Engine:
        return self.around(self._flat.open())

    def around(self, flat: Engine) -> HierarchicalEngine:
        """Returns a two-level engine over a flat one, which it takes over. Every rank must call it."""
        with contextlib.ExitStack() as undo:
            scatter, gather, across = (
                undo.enter_context(contextlib.closing(factory.open()))
                for factory in (self._within, self._within, self._across)
            )
            undo.pop_all()
        return HierarchicalEngine(flat, scatter, across, gather, self._host_groups, self._devices)

    def restrict(self, engine: HierarchicalEngine, devices: set[str]) -> None:
        """Uses two levels only for tensors on ``devices``, in this engine and in all that are opened later."""
        self._devices, engine.devices = devices, frozenset(devices)

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        return self._flat.among(group_ranks, group_rank, token)


def choose_levels(
    group: Group,
    engine_factory: EngineFactory,
    within: EngineFactory | None,
    nodes: Sequence[Hashable],
    wanted: bool | None,
    device: torch.device | None,
) -> None:
    """Give the group a two-level engine where that is wanted, or faster.

    Every rank must call it before making another group from this one. ``engine_factory`` has opened the group's engine.
    ``within`` is a better factory for the ranks of this host (shared memory), if there is one; CPU tensors then use two
    levels unless ``wanted`` is False. ``nodes`` are the ranks' hosts. ``wanted`` is True for two levels, False for
    flat, and None to measure on ``device``, this rank's GPU, or None on all ranks.
    """
    host_groups = host_groups_of(group.rank, nodes)
    if host_groups is None:
        if wanted and group.rank == 0:
            log.warning(
                "hierarchical all-reduces are not used: they need several hosts with the same number of ranks, at "
                "least 2 on each; these hosts have %s",
                ", ".join(str(list(nodes).count(node)) for node in dict.fromkeys(nodes)),
            )
        return
    devices = {"cpu", "cuda"} if wanted else {"cpu"} if within is not None else set()
    if wanted is False or (not devices and device is None):
        return
    (token, *_) = group.all_gather_json(uuid.uuid4().hex, "hvd.init()")
    levels = HierarchicalEngineFactory(engine_factory, within, host_groups, group.rank, token, {*devices, "cuda"})
    engine = levels.around(group.engine)
    try:
        if wanted is None and (device is None or fastest([group.engine, engine], group, device) == 0):
            # Engines made from now on do not use two levels for GPU tensors either.
            levels.restrict(engine, devices)
    except BaseException:
        engine.close_levels()
        raise
    if engine.devices:
        group.change_engines(levels, engine)
    else:
        engine.close_levels()


def fastest(engines: Sequence[Engine], group: Group, device: torch.device) -> int:
    """Returns the index of the engine of these ranks with the fastest all-reduces, as rank 0 measures."""
    try:
        medians_s = [[_median_s(engine, numel_bytes, device) for engine in engines] for numel_bytes in _TRIAL_BYTES]
    except RuntimeError as error:
        # The engine's own, where a rank is lost meanwhile.
        raise group.error_of("hvd.init()", error) from error
    # Every size has the same weight.
    shares = [sum(row[index] / min(row) for row in medians_s) for index in range(len(engines))]
    (chosen, *_) = group.all_gather_json(shares.index(min(shares)), "hvd.init()")
    if group.rank == 0:
        log.info(
            "all-reduces of %s MiB took %s ms with each engine, flat and hierarchical: engine %d is used",
            [numel_bytes // 2**20 for numel_bytes in _TRIAL_BYTES],
            [[round(1e3 * seconds, 3) for seconds in row] for row in medians_s],
            chosen + 1,
        )
    return int(chosen)


def _median_s(engine: Engine, numel_bytes: int, device: torch.device) -> float:
    from statistics import median  # noqa: PLC0415  # takes 10 ms to import, and most jobs never measure

    tensor = torch.zeros(numel_bytes // 4, device=device, dtype=torch.float32)
    took_s = []
    for _ in range(_WARM_UP + _TRIALS):
        began_s = time.perf_counter()
        engine.allreduce([tensor], dist.AllreduceOptions()).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(device)
        took_s.append(time.perf_counter() - began_s)
    return median(took_s[_WARM_UP:])
