"""
All-reduces in three steps where hosts have several ranks: within each host, between the hosts, within each host.
Reduce-scatters are the first two.

    tensor ── reduce-scatter among a host's ranks ── shard ── all-reduce among the ranks that have the same shard,
           one on each host ── all-gather among the host's ranks ── tensor

So a host sends over the network what one rank would, and every local rank carries its share of that. For networks
slower than what joins the ranks of a host; which way is the faster is found out in `engine_selection`.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from .engine import Done, Engine, EngineWork, HasMemory, PeerGoneError
from .engine_state import EngineState
from .flat_bytes import pieces_of
from .host_groups import HostGroups

# For less than this one step takes less time than three, whatever the network.
LEAST_BYTES = 64 * 2**10

_CLOSING_S = 1.0

# Of shards' memory that waits for the next ones; a step's buckets, shared out, are less.
_MOST_KEPT_BYTES = 256 * 2**20


class HostEngine(Engine, Protocol):
    """What is needed of an engine between the ranks of a host: a process group has it."""

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> EngineWork: ...


class HierarchicalEngine:
    """Reduces large tensors in two levels, within hosts and between them; all else goes through a flat engine.

    Floats of 16 bits are rounded in each step.
    """

    def __init__(
        self,
        flat: Engine,
        scatter: HostEngine,
        across: Engine,
        gather: HostEngine,
        host_groups: HostGroups,
        devices: set[str],
    ) -> None:
        """``scatter`` and ``gather`` are between the ranks of a host, ``across`` between those of the same local rank.

        Each is to be an engine of its own: so one tensor's second step does not wait for the next one's first.
        ``host_groups`` are those in the flat engine; ``devices`` types of device, such as ``cuda``.
        """
        self.flat = flat
        self.parts = (scatter, across, gather)
        self._scatter, self._across, self._gather = self.parts
        self._host_groups = host_groups
        self._local_size = len(host_groups.within)
        self._state = EngineState()
        self.devices = frozenset(devices)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._shards = _Shards()
        self._follower: _Follower | None = None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self._scatter.empty(numel, dtype) if isinstance(self._scatter, HasMemory) else None

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork:
        (tensor,) = tensors
        self._state.require_open()
        if not self._takes(tensor):
            return self.flat.allreduce(tensors, opts)
        whole = tensor.view(-1)
        even = whole.numel() - whole.numel() % self._local_size
        # The few elements that cannot be shared out take the flat way meanwhile.
        rest = self.flat.allreduce([whole[even:]], opts) if even < whole.numel() else None
        return self._go(
            _AllReduceWay(self._across, self._gather, whole[:even], self._local_size, rest, opts, self._shards), tensor
        )

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        self._state.require_open()
        if not self._takes(input):
            return self.flat.reduce_scatter_base(output, input, counts, opts)
        return self._go(
            _ReduceScatterWay(self._across, output, input, counts, self._host_groups, opts, self._shards), input
        )

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.device.type in self.devices and tensor.numel() * tensor.element_size() >= LEAST_BYTES

    def _go(self, way: _Way, tensor: Tensor) -> EngineWork:
        way.begin(self._scatter)
        if tensor.is_cuda:
            # The wait of a CUDA engine holds up the stream that it is called in: not the program's, but this one.
            with torch.cuda.stream(self._stream(tensor.device)):
                way.cross()
                return _Holding(way.gather(), way)
        if self._follower is None:
            self._follower = _Follower(self._host_groups.within)
        return self._follower.follow(way)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own is untyped
        return self._streams[device]

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork:
        return self.flat.broadcast(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork:
        return self.flat.allgather(outputs, inputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork:
        return self.flat.alltoall_base(output, input, output_counts, input_counts, opts)

    def revoke(self, reason: str, /) -> None:
        self._state.revoke(reason)
        for engine in (self.flat, *self.parts):
            engine.revoke(reason)

    def quiesce(self, reason: str, /) -> None:
        self._state.quiesce(reason)
        if self._follower is not None:
            self._follower.settle()
        for engine in (self.flat, *self.parts):
            engine.quiesce(reason)

    def close(self) -> None:
        """Follow nothing further; the engines themselves belong to who made them."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None


class _Way(Protocol):
    """One tensor's steps, each of which begins when the one before is over."""

    def begin(self, scatter: HostEngine, /) -> None:
        """Begin the first step, within the host."""
        ...

    def cross(self) -> None:
        """Begin the second step, between hosts; waits for the first, or has the current stream wait for it."""
        ...

    def gather(self) -> EngineWork:
        """Wait in the same manner for the second step, and begin the third; the one whose end is the end of all."""
        ...

    def finish(self) -> None:
        """All steps are over: memory may be used again."""
        ...


class _AllReduceWay:
    """Reduce-scatter within the host, all-reduce of the shard between hosts, all-gather within the host."""

    def __init__(
        self,
        across: Engine,
        gather: HostEngine,
        main: Tensor,
        local_size: int,
        rest: EngineWork | None,
        opts: dist.AllreduceOptions,
        shards: _Shards,
    ) -> None:
        self._across = across
        self._gather = gather
        self._main = main
        self._shards = shards
        self._shard = shards.take(main.numel() // local_size, main)
        self._rest = rest
        self._opts = opts
        self._scattered: EngineWork | None = None
        self._crossing: EngineWork | None = None

    def begin(self, scatter: HostEngine) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = self._opts.reduceOp
        counts = [self._shard.numel()] * (self._main.numel() // self._shard.numel())
        self._scattered = scatter.reduce_scatter_base(self._shard, self._main, counts, options)

    def cross(self) -> None:
        assert self._scattered is not None, "begun before"
        self._scattered.wait()
        self._crossing = self._across.allreduce([self._shard], self._opts)

    def gather(self) -> EngineWork:
        assert self._crossing is not None, "begun before"
        self._crossing.wait()
        if self._rest is not None:
            self._rest.wait()
        return self._gather._allgather_base(self._main, self._shard)

    def finish(self) -> None:
        self._shards.give_back(self._shard)


class _ReduceScatterWay:
    """Reduce-scatter within the host of what the ranks of each local rank are to get, and then among those."""

    def __init__(
        self,
        across: Engine,
        output: Tensor,
        input: Tensor,
        counts: Sequence[int],
        host_groups: HostGroups,
        opts: dist.ReduceScatterOptions,
        shards: _Shards,
    ) -> None:
        self._across = across
        self._output = output
        self._opts = opts
        self._shards = shards
        # By local rank, the ranks that have it.
        columns = list(zip(*host_groups.hosts, strict=True))
        parts = pieces_of(input, counts)
        self._sent = torch.cat([parts[rank] for column in columns for rank in column])
        self._counts_within = [sum(counts[rank] for rank in column) for column in columns]
        self._counts_across = [counts[rank] for rank in host_groups.across]
        self._shard = shards.take(sum(self._counts_across), input)
        self._scattered: EngineWork | None = None
        self._crossing: EngineWork | None = None

    def begin(self, scatter: HostEngine) -> None:
        self._scattered = scatter.reduce_scatter_base(self._shard, self._sent, self._counts_within, self._opts)

    def cross(self) -> None:
        assert self._scattered is not None, "begun before"
        self._scattered.wait()
        self._crossing = self._across.reduce_scatter_base(self._output, self._shard, self._counts_across, self._opts)

    def gather(self) -> EngineWork:
        assert self._crossing is not None, "begun before"
        return self._crossing

    def finish(self) -> None:
        self._shards.give_back(self._shard)


class _Shards:
    """Memory for the shards of a host's ranks, which is used again: fresh pages cost as much as a copy of them.

    There are at most as many pieces as shards were under way at once. Those of GPUs are the allocator's of PyTorch,
    which does the same, and knows of streams.
    """

    def __init__(self) -> None:
        # Flat bytes, ascending by how many.
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Room for so many elements, of the dtype and on the device of ``like``; what lies there is anything."""
        if like.device.type != "cpu":
            return like.new_empty(numel)
        nbytes = numel * like.element_size()
        with self._lock:
            at = bisect_left(self._free, nbytes, key=torch.numel)
            # One that is too small goes, and a larger one comes for it.
            memory = self._free.pop(min(at, len(self._free) - 1)) if self._free else None
        if memory is None or memory.numel() < nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory[:nbytes].view(like.dtype)

    def give_back(self, shard: Tensor) -> None:
        """Whose way is over."""
        if shard.device.type != "cpu":
            return
        memory = shard.view(torch.uint8).as_strided((shard.untyped_storage().nbytes(),), (1,))
        with self._lock:
            if sum(map(torch.numel, self._free)) + memory.numel() <= _MOST_KEPT_BYTES:
                insort(self._free, memory, key=torch.numel)


class _Holding:
    """A CUDA engine's work, and the memory that it needs until it has been waited for."""

    def __init__(self, work: EngineWork, memory: object) -> None:
        self._work = work
        self._memory = memory

    def wait(self) -> object:
        return self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()


class _Follower:
    """Two threads that take one tensor after the other from step to step, as the program may be anywhere meanwhile.

    One for the first two steps, and one for the third, so that the network does not wait for that.
    """

    def __init__(self, within: Sequence[int]) -> None:
        """``within`` are the host's ranks in the group, for an engine of theirs says who has gone by its own."""
        self._within = within
        self._scattered: SimpleQueue[_Step | None] = SimpleQueue()
        self._crossed: SimpleQueue[_Step | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name="hvdlite hierarchy", daemon=True) for run in (self._cross, self._gather)
        ]
        for thread in self._threads:
            thread.start()

    def follow(self, way: _Way) -> EngineWork:
        done: torch.futures.Future[None] = torch.futures.Future()
        self._scattered.put((way, done))
        return _Followed(done)

    def settle(self) -> None:
        """Return when all that was followed by now is over, whether it has failed or not."""
        self.follow(_NoWay()).wait()

    def close(self) -> None:
        """Let the threads end, and with them their hold on engines: at once, unless a rank has gone in midst of it."""
        self._scattered.put(None)
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _cross(self) -> None:
        while (item := self._scattered.get()) is not None:
            with self._failing(item[1]):
                item[0].cross()
                self._crossed.put(item)
            # Or its engines and memory would be kept until the next.
            del item
        self._crossed.put(None)

    def _gather(self) -> None:
        while (item := self._crossed.get()) is not None:
            with self._failing(item[1]):
                item[0].gather().wait()
                item[0].finish()
                item[1].set_result(None)
            del item

    @contextlib.contextmanager
    def _failing(self, done: torch.futures.Future[None]) -> Iterator[None]:
        """What is raised inside is raised where the program waits."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is
            if isinstance(error, PeerGoneError):
                error = PeerGoneError(str(error), self._within[error.group_rank])
            done.set_exception(error)  # type: ignore[arg-type]  # torch's own says that it takes a result


_Step: TypeAlias = tuple[_Way, "torch.futures.Future[None]"]


class _NoWay:
    """Steps that do nothing: they end once all steps queued before them have ended."""

    def begin(self, scatter: HostEngine) -> None:
        return

    def cross(self) -> None:
        return

    def gather(self) -> EngineWork:
        return Done()

    def finish(self) -> None:
        return


class _Followed:
    def __init__(self, done: torch.futures.Future[None]) -> None:
        self._done = done

    def wait(self) -> object:
        return self._done.wait()

    def is_completed(self) -> bool:
        return self._done.done()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._done
