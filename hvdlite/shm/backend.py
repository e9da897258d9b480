"""
The backend ``hvdshm`` of `torch.distributed`, for DDP and other code that chooses a backend by name.

    import hvdlite
    torch.distributed.init_process_group("cpu:hvdshm")

`ShmProcessGroup` converts the calls of `torch.distributed` that have other names or arguments, and passes them to a
`ShmEngine`; it builds gather, scatter and reduce from others. hvdlite itself does not use it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, Store

from ..comm.gloo import InitTimeout
from ..signing import Signer
from .queue import ShmWork
from .segment import NoMemoryError
from .setup import exchange_control_blocks, open_segment
from .shm_engine import ShmEngine, even_parts

NAME = "hvdshm"


# torch's stubs have other names and signatures in each version; torch passes all arguments by position.
_ProcessGroup: Any = dist.ProcessGroup


class ShmProcessGroup(_ProcessGroup):  # type: ignore[misc]  # of type Any, see above
    """A process group of ranks of one host, for CPU tensors. Each collective returns a work that has a future, too."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Every rank must make one, and waits for all. A RuntimeError on all ranks if one is on another host."""
        super().__init__(rank, size)
        try:
            # The signer's key is empty: everything that can write to this store is trusted.
            context = exchange_control_blocks(store, rank, size, open_segment, InitTimeout(timeout), Signer(b""))
        except NoMemoryError as error:
            raise RuntimeError(
                f"{NAME} needs ranks of one host that share memory: {error}. Use gloo between hosts, or where /dev/shm "
                "is too small"
            ) from error
        self._engine = ShmEngine(context, NAME)

    # torch stores these in its C++ backends, which this group lacks.
    group_name = group_desc = ""

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    def getBackendName(self) -> str:  # noqa: N802 - torch's own name
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        return self._engine.allreduce(tensors, _all_reduce_options(opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        # Here and below, operations end in order.
        return [self._engine.allreduce([tensor], _all_reduce_options(opts)) for tensor in tensors][-1]

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._engine.broadcast(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        return self._engine.allgather(outputs, inputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> ShmWork:
        return self._engine.allgather_base(output, input)

    # Newer versions of torch call these names without an underscore.
    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        return [self._allgather_base(output, part) for output, part in zip(outputs, inputs, strict=True)][-1]

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ShmWork:
        ((output,), (parts,)) = outputs, inputs
        return self._engine.reduce_scatter(output, parts, opts.reduceOp)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> ShmWork:
        return self._engine.reduce_scatter(output, even_parts(input, self.size()), opts.reduceOp, input)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> ShmWork:
        pairs = zip(outputs, inputs, strict=True)
        return [self._reduce_scatter_base(output, whole, opts) for output, whole in pairs][-1]

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: Any = None
    ) -> ShmWork:
        return self._engine.alltoall_base(output, input, output_counts, input_counts, opts or AllToAllOptions())

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        return self._engine.alltoall(outputs, inputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ShmWork:
        ((tensor,),) = (inputs,)
        empty = tensor.new_empty(0)
        parts = outputs[0] if self.rank() == opts.rootRank else [empty] * self.size()
        sent = [tensor if group_rank == opts.rootRank else empty for group_rank in range(self.size())]
        return self._engine.alltoall(parts, sent)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ShmWork:
        ((output,),) = (outputs,)
        empty = output.new_empty(0)
        sent = inputs[0] if self.rank() == opts.rootRank else [empty] * self.size()
        received = [output if group_rank == opts.rootRank else empty for group_rank in range(self.size())]
        return self._engine.alltoall(received, sent)

    def reduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        (tensor,) = tensors
        # Only the root's tensor may change.
        return self.allreduce([tensor if self.rank() == opts.rootRank else tensor.clone()], opts)

    def barrier(self, opts: Any = None) -> ShmWork:
        return self._engine.barrier()

    def send(self, *_: object) -> NoReturn:
        raise NotImplementedError(
            f"{NAME} does not support send and recv: use a gloo group, dist.new_group(backend='gloo')"
        )

    recv = recv_anysource = send

    def shutdown(self) -> None:
        self._engine.close()

    abort = shutdown


def _all_reduce_options(opts: Any) -> dist.AllreduceOptions:
    """Returns options with the op of some other collective's."""
    options = dist.AllreduceOptions()
    if opts is not None:
        options.reduceOp = opts.reduceOp
    return options
