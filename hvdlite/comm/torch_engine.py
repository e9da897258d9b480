"""
`TorchEngine`: an engine over a process group of `torch.distributed`: gloo for CPU tensors, NCCL or gloo for GPUs.

Each call checks that the engine is open, starts an operation of the process group, and returns a `TorchWork`, whose
waits end if the engine is revoked. Over gloo a reduce-scatter, and a small all-reduce of two ranks, is an all-to-all
and local sums; all-to-alls, and larger all-gathers of two ranks, are `messages`.

`TorchEngineFactory` opens these engines: on the default process group, which `runtime.connect_ranks` opens, and on
further ones. These connect through the store of hvdlite's own ranks, and `gloo` proves that each connection is one to a
rank of this job.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, Store

from ..errors import CommunicationError, lack_of
from .deferred_close import keep_until
from .engine import Engine, EngineFactory, EngineState, SingleRankFactory
from .flat_bytes import pieces_of
from .gloo import ConnectingRanks, make_gloo, open_proven, wait_for_all
from .gloo_sockets import Connections
from .messages import MOST_RANKS, NOT_DONE_YET, Messages

WaitUntilSet = Callable[[Store, Sequence[str], timedelta], None]

_BACKEND_TYPES = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}

# How often a long wait checks whether the engine was revoked. Usually the operation itself ends in that case.
_LOOK = timedelta(seconds=0.02)

# The same of a wait for a GPU, which nothing else ends, and of one for the other messages of a swap that has failed.
_SHORT_LOOK_S = 0.0005

# How long `quiesce` waits for operations of gloo that were revoked: see `gloo_sockets.Connections.end_waits`.
_ENDING_S = 1.0

# Gloo sums tensors of two ranks by several messages each way, one after the other. To exchange tensors of up to this
# size, and add here, takes one, and a third of the processor time.
_MOST_EXCHANGED_BYTES = 2**18

# Two ranks swap tensors of at least this size in an all-gather, since gloo's has two thirds of the rate of a link; for
# smaller ones it takes less processor time. With more ranks gloo's passes them on in a ring, at nearly the full rate.
_LEAST_SWAPPED_BYTES = 2**16

# Completed works that nobody has waited for are dropped when there are more than this.
_MOST_PENDING = 64

_COMBINE: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


class TorchEngine(Engine):
    """Runs collectives on one process group, and can end its waits and operations early."""

    def __init__(
        self,
        process_group: Any,
        *,
        has_nccl: bool = False,
        cut: Callable[[], None] = lambda: None,
        shut_down: Callable[[], None] = lambda: None,
    ) -> None:
        """``has_nccl``: GPU tensors use NCCL. ``cut`` ends gloo's waits, and ``shut_down`` the process group."""
        super().__init__()
        self.process_group = process_group
        self._has_nccl = has_nccl
        self._cut = cut
        self._shut_down = shut_down
        self._messages = Messages(process_group, cut)
        self._pending: set[TorchWork] = set()
        # By device, the last operation on a GPU. Those before it end before it does.
        self._last_on_gpu: dict[torch.device, TorchWork] = {}
        self.cannot_repeat = {"cuda": "NCCL" if has_nccl else "gloo on GPUs"}
        self.ways = {"cpu": ("gloo",), "cuda": ("nccl" if has_nccl else "gloo",)}

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> TorchWork | _CombinedHere:
        self._state.require_open()
        (tensor,) = tensors
        if tensor.is_cpu and tensor.nbytes <= _MOST_EXCHANGED_BYTES and self.process_group.size() == 2:
            return self._exchange(tensor, opts)
        return self._begun(self.process_group.allreduce([self._written(tensor)], opts), tensor)

    def _written(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with the same memory, through which an operation writes its result."""
        # The end of gloo's operation on a GPU raises the `_version`, as if the program had changed the tensor.
        return tensor if self._has_nccl or tensor.is_cpu else tensor.data

    def _exchange(self, tensor: Tensor, opts: dist.AllreduceOptions) -> _CombinedHere:
        """Reduces two ranks' small tensors: each sends all of its own, and combines both, in rank order."""
        op: Any = opts.reduceOp  # torch's stubs lack some attributes
        # Like gloo's own, this is no change that autograd counts.
        own, flat = self.process_group.rank(), tensor.data.view(-1)
        counts = [0 if rank == own else flat.numel() for rank in range(2)]
        received = torch.empty_like(flat)
        work = self.process_group.alltoall_base(received, flat, counts, counts, AllToAllOptions())
        sent = self._begun(work, flat)
        return _CombinedHere(sent, [received, flat] if own else [flat, received], _COMBINE[op.op], flat)

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> TorchWork:
        self._state.require_open()
        return self._begun(self.process_group.broadcast(tensors, opts), tensors[0])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> TorchWork:
        self._state.require_open()
        ((output,), (input,)) = outputs, inputs
        if self._swaps(input):
            return self._begun(self._messages.swap(output, [input] * 2), input)
        return self._begun(self.process_group.allgather(outputs, inputs), input)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> TorchWork:
        self._state.require_open()
        if input.is_cpu and self.process_group.size() <= MOST_RANKS:
            swap = self._messages.swap(pieces_of(output, output_counts), pieces_of(input, input_counts))
            return self._begun(swap, input)
        return self._begun(self.process_group.alltoall_base(output, input, output_counts, input_counts, opts), input)

    def allgather_base(self, output: Tensor, input: Tensor, /) -> TorchWork:
        self._state.require_open()
        if self._swaps(input):
            return self._begun(self._messages.swap(list(output.view(2, *input.shape)), [input] * 2), input)
        return self._begun(self.process_group._allgather_base(self._written(output), input), input)

    def _swaps(self, tensor: Tensor) -> bool:
        """Whether an all-gather of this size is a swap; equal on all ranks."""
        return tensor.is_cpu and self.process_group.size() == 2 and tensor.nbytes >= _LEAST_SWAPPED_BYTES

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> TorchWork | _CombinedHere:
        """Use NCCL's own on GPUs; over gloo do an all-to-all, and combine the received parts here in rank order."""
        # Gloo's own takes twice as long (PyTorch 2.13, 2 and 4 ranks of one host, 4 MB), and older versions have none.
        self._state.require_open()
        if input.is_cuda and self._has_nccl:
            if len(set(counts)) == 1:
                return self._begun(self.process_group._reduce_scatter_base(output, input, opts), input)
            parts = pieces_of(input, counts)
            return self._begun(self.process_group.reduce_scatter([output], [parts], opts), input)
        op: Any = opts.reduceOp  # torch's stubs lack some attributes
        size = len(counts)
        received = input.new_empty(size * output.numel())
        sent = self.alltoall_base(received, input, [output.numel()] * size, counts, AllToAllOptions())
        terms = pieces_of(received, [output.numel()] * size)
        return _CombinedHere(sent, terms, _COMBINE[op.op], output)

    def revoke(self, reason: str, /) -> None:
        if self._state.revoke(reason):
            self._cut()
            if self._has_nccl:
                # Nothing else ends a wait of the GPU for another rank.
                with contextlib.suppress(RuntimeError):
                    self.process_group._get_backend(torch.device("cuda")).abort()

    def quiesce(self, reason: str, /) -> None:
        """Refuse new operations, and wait until those in progress have ended.

        Once the engine is revoked, for at most a second. An operation that gloo has not ended by then transfers nothing
        more, but may read and write this rank's tensors until its timeout.
        """
        self._state.quiesce(reason)
        for work in list(self._pending):
            work.wait_until_ended()

    def require_ended(self) -> None:
        for work in list(self._last_on_gpu.values()):
            work.require_ended()
        self._state.require_not_revoked()

    def close(self) -> None:
        """Shut the process group down. It outlives the works in progress, since its destructor would wait for them."""
        works = [work for work in list(self._pending) if not (work.is_on_gpu and self._has_nccl)]
        left = [work for work in works if not work.has_ended]
        self._pending.clear()
        self._last_on_gpu.clear()
        if left:
            self._cut()
            keep_until(lambda: all(work.has_ended for work in left), self.process_group)
        self._shut_down()

    def _begun(self, work: Any, tensor: Tensor) -> TorchWork:
        made = TorchWork(work, tensor, self._state, self._pending)
        if made.is_on_gpu:
            self._last_on_gpu[tensor.device] = made
        if len(self._pending) > _MOST_PENDING:
            self._pending -= {each for each in list(self._pending) if each.is_completed()}
        return made


class TorchWork:
    """An operation of a process group in progress. Any number of threads may wait for it."""

    def __init__(self, work: Any, tensor: Tensor, state: EngineState, pending: set[TorchWork]) -> None:
        self._work = work
        self._device = tensor.device
        self.is_on_gpu = tensor.device.type == "cuda"
        self._state = state
        self._pending = pending
        pending.add(self)

    def wait(self) -> object:
        """Block until the operation is over, or raise its error; on a GPU only the current stream waits."""
        try:
            # On CUDA this returns at once: the current stream waits, and not the host.
            return self._work.wait() if self.is_on_gpu else self._wait_on_cpu()
        except RuntimeError:
            self._state.require_not_revoked()
            raise
        finally:
            # A wait that the revocation has ended leaves the operation behind.
            if self.is_on_gpu or self.has_ended:
                self._pending.discard(self)

    def _wait_on_cpu(self) -> object:
        while True:
            try:
                return self._work.wait(_LOOK)
            except RuntimeError as error:
                if NOT_DONE_YET not in str(error):
                    raise
            if self.has_ended:
                return self._work.wait()
            self._state.require_not_revoked()

    def wait_until_ended(self) -> None:
        """Block this thread until the operation uses its tensors no more; see `TorchEngine.quiesce`."""
        if self.is_on_gpu:
            with contextlib.suppress(RuntimeError):
                self.wait()
                torch.cuda.current_stream(self._device).synchronize()
            return
        until_s: float | None = None
        while not self.has_ended:
            if until_s is None and self._state.is_revoked:
                until_s = time.monotonic() + _ENDING_S
            if until_s is not None and time.monotonic() > until_s:
                return
            try:
                self._work.wait(_LOOK)
            except RuntimeError:
                time.sleep(_SHORT_LOOK_S)
        self._pending.discard(self)

    def require_ended(self) -> None:
        # Not by a wait with a timeout, at whose end NCCL would abort the communicator.
        while not self.has_ended:
            self._state.require_not_revoked()
            time.sleep(_SHORT_LOOK_S)
        # An operation that has failed has ended, too.
        self.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the operation itself has ended or failed, which may be later than a revocation."""
        return bool(self._work.is_completed())

    def is_completed(self) -> bool:
        return self._state.is_revoked or self.has_ended

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future


@dataclass(eq=False)
class _CombinedHere:
    """A reduce-scatter over gloo, or a small all-reduce: an all-to-all in progress, whose parts this rank combines."""

    _sent: TorchWork
    _terms: Sequence[Tensor]
    _combine: Callable[..., Tensor]
    _output: Tensor
    _combining: threading.Lock = field(default_factory=threading.Lock)
    _is_combined: bool = False

    def wait(self) -> object:
        self._sent.wait()
        self._finish()
        return True

    def is_completed(self) -> bool:
        return self._sent.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._sent.get_future().then(self._finish_after)

    def _finish_after(self, sent: torch.futures.Future[Any]) -> list[Tensor]:
        sent.value()
        self._finish()
        return [self._output]

    def _finish(self) -> None:
        # A waiting thread and gloo's thread that completes the future may both call this: combine once.
        # In inference mode, since its tensors may be changed in no other, and others in any.
        with self._combining, torch.inference_mode():
            if self._is_combined:
                return
            first, *others = self._terms
            dtype = first.dtype
            is_narrow = dtype.is_floating_point and dtype.itemsize <= 2
            total = first.to(torch.float32) if is_narrow else first
            for term in others:
                self._combine(total, term.to(total.dtype), out=total)
            self._output.copy_(total)
            # Whoever keeps this work keeps no memory of what was received.
            self._terms = ()
            self._is_combined = True


def allow_collectives(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of the CPU collectives of ``group``."""
    backend: Any = group._get_backend(torch.device("cpu"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL it is within a backend that compares collectives.
    getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


class TorchEngineFactory:
    """Opens engines between some of the ranks, or all, each on a process group of its own over the ranks' store.

    Not by `dist.new_group`, which every rank of the job would have to call in one order with the program's own calls.
    """

    def __init__(
        self, backend: str, ranks: ConnectingRanks, unused_default: tuple[dist.ProcessGroup, Connections] | None = None
    ) -> None:
        """``backend`` is ``gloo``, or a map such as ``cpu:gloo,cuda:nccl``; a RuntimeError for another one in the map.

        ``unused_default`` is the default process group, if hvdlite has made it: the first engine is on this one.
        """
        self._ranks = ranks
        self._backend = backend
        self._backend_of = _backend_by_device(backend)
        self._has_nccl = self._backend_of["cuda"] == "nccl"
        self._unused_default = unused_default
        self._opened = itertools.count()
        # As long as the groups, which refer to them.
        self._stores: list[EndingStore] = []

    def open(self) -> Engine:
        if self._unused_default is not None:
            (default, connections), self._unused_default = self._unused_default, None
            return TorchEngine(default, has_nccl=self._has_nccl, cut=connections.end_waits)
        label = f"channel{next(self._opened)}"
        wait_for_all(self._ranks, label)
        try:
            group, connections = open_proven(
                partial(self._make, label), lambda made: made.shutdown(), self._ranks, label
            )
        except CommunicationError:
            raise
        except (OSError, RuntimeError) as error:
            # Torch's own, where a rank is lost while these connect.
            why = lack_of(error) or (
                f"one of them has ended or cannot be reached; look at their output for the cause ({error})"
            )
            own = self._ranks.names[self._ranks.rank]
            raise CommunicationError(f"{own} could not connect to the other ranks: {why}") from error

        def shut_down() -> None:
            connections.shut_down()
            group.shutdown()

        return TorchEngine(group, has_nccl=self._has_nccl, cut=connections.end_waits, shut_down=shut_down)

    def _make(self, label: str, connections: Connections) -> dist.ProcessGroup:
        store = PrefixStore(label, self._ranks.store)
        group = dist.ProcessGroup(store, self._ranks.rank, self._ranks.size)
        made: dict[str, Any] = {}
        for device, name in self._backend_of.items():
            if name not in made:
                made[name] = self._make_backend(name, PrefixStore(device, store), connections)
            group._register_backend(torch.device(device), _BACKEND_TYPES[name], made[name])
        group._set_default_backend(_BACKEND_TYPES[self._backend_of["cpu"]])
        return group

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        if len(group_ranks) == 1:
            return SingleRankFactory()
        return TorchEngineFactory(self._backend, self._ranks.among(group_ranks, group_rank, token))

    def _make_backend(self, name: str, store: Store, connections: Connections) -> Any:
        rank, size, init_timeout = self._ranks.rank, self._ranks.size, self._ranks.init_timeout
        if name == "gloo":
            # Held until gloo has connected.
            ending = EndingStore(store, init_timeout.left(), self._ranks.store_wait())
            gloo = make_gloo(ending, rank, size, init_timeout.left(), connections)
            gloo._set_default_timeout(init_timeout.timeout)
            self._stores.append(ending)
            return gloo
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = init_timeout.timeout
        options.global_ranks_in_group = list(self._ranks.global_ranks)  # NCCL's watchdog reports them
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _backend_by_device(backend: str) -> dict[str, str]:
    """Returns the backend of CPU and of CUDA tensors, from ``gloo`` or from ``cpu:gloo,cuda:nccl``."""
    if ":" not in backend:
        return {"cpu": backend, "cuda": backend}
    backend_of = dict(item.split(":") for item in backend.split(","))
    unknown = sorted(set(backend_of.values()) - _BACKEND_TYPES.keys())
    if unknown:
        raise RuntimeError(
            f"torch.distributed.init_process_group was called with the backend {unknown[0]}, and hvdlite supports only "
            "gloo and nccl: choose one of these, or let hvd.init() call init_process_group"
        )
    return backend_of


class EndingStore(Store):
    """A store in which gloo, while it connects, waits for the address of each rank, by ``wait_until_set``.

    So the wait ends when a rank ends, or fails to open its part. C++ looks the methods up by name, and keeps no
    reference to the Python object: its maker must, while gloo connects.
    """

    def __init__(self, store: Store, timeout: timedelta, wait_until_set: WaitUntilSet) -> None:
        """``timeout`` is that of `get`."""
        super().__init__()
        self._store = store
        self._patience = timeout
        self._wait_until_set = wait_until_set

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # torch's stubs lack bytes

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_until_set(self._store, keys, self._patience if timeout is None else timeout)

    def has_extended_api(self) -> bool:
        # Gloo then asks by `get` and `set` alone.
        return False
