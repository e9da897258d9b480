"""
The part of `links` that every rank runs: trains with each technique in turns, and counts time and bytes of each block.

`links` calls `measure` in a user's own job. On hosts that it makes itself, it starts this module as the program of
each rank, and reads a line of JSON from rank 0's stdout after each round. Its arguments are the techniques, joined by
commas, the number of rounds, the model and the batch size.

A `Technique` is a way of sending gradients, of hvdlite's or of DDP's. docs/measuring.md has a table of them; a new one
is an entry of `TECHNIQUES`.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..buckets.outer import DiLoCo, LocalSGD
from ..compression.casts import Compression
from ..runtime.world import current_world, init
from .ranks import Ranks, Samples
from .training import WORKLOADS, Batch, Inner, Make, Training, bytes_of, ddp, in_fp16, own, sgd

DDP, DDP_FP16 = "ddp", "ddp-fp16"
_RANK = 4  # of the thin matrices of both PowerSGDs
# Unmeasured steps. In the third one DDP's PowerSGD compresses for the first time; it allows no earlier start.
_WARM_UPS, _DDP_START_STEP = 3, 2


@dataclass(frozen=True)
class Technique:
    """How gradients are sent. All blocks take ``interval`` steps, since only the last of them may send anything."""

    make: Make
    interval: int = 1

    @property
    def warm_ups(self) -> int:
        """The number of unmeasured steps: whole intervals, so that each block is one."""
        return _WARM_UPS if self.interval == 1 else self.interval


def _ddp_powersgd(ranks: Ranks, model: nn.Module, inner: Inner = sgd) -> Training:
    # Over gloo in a single bucket. The hook starts its second and third all-reduce in callbacks, whose order between
    # buckets may differ between ranks, and which then wait for each other: ranks end with an error, or hang.
    cap_mb = None if ranks.device.type == "cuda" else bytes_of(model) // 2**20 + 1
    return ddp(ranks, model, inner, bucket_cap_mb=cap_mb, hook=_powersgd_hook)


def _powersgd_hook(group: dist.ProcessGroup, wrapped: DistributedDataParallel) -> None:
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    state = hooks.PowerSGDState(group, matrix_approximation_rank=_RANK, start_powerSGD_iter=_DDP_START_STEP)
    wrapped.register_comm_hook(state, hooks.powerSGD_hook)


def _compressed(compression: object) -> Technique:
    return Technique(partial(own, compression=compression))


def _outer(outer: LocalSGD | DiLoCo) -> Technique:
    return Technique(partial(own, outer=outer), outer.sync_every)


TECHNIQUES = {
    DDP: Technique(ddp),
    DDP_FP16: Technique(partial(ddp, hook=in_fp16)),
    "ddp-powersgd": Technique(_ddp_powersgd),
    "none": _compressed(Compression.none),
    "fp16": _compressed(Compression.fp16),
    "bf16": _compressed(Compression.bf16),
    "int8": _compressed(Compression.int8),
    "int4": _compressed(Compression.int4),
    "topk": _compressed(Compression.topk()),
    "powersgd": _compressed(Compression.powersgd(_RANK, start_step=0)),
    "localsgd": _outer(LocalSGD(sync_every=8)),
    "diloco": _outer(DiLoCo(sync_every=100, compression=Compression.int4)),
}


def is_ddp(name: str) -> bool:
    return name.startswith(DDP)


def missing_for(name: str) -> str | None:
    """Returns a message about a package that the technique needs and that is not installed, or None."""
    if name == "ddp-powersgd" and importlib.util.find_spec("numpy") is None:
        return "ddp-powersgd: PyTorch's hook needs numpy, which is not installed"
    return None


COUNTERS = Path("/proc/net/dev")
_FIRST_ROWS = 2  # of headings
_SENT = 8  # the column of sent bytes, after the eight of what was received


def measure(
    ranks: Ranks,
    model: nn.Module,
    batch: Batch,
    rounds: int,
    times: Samples,
    sent: Samples,
    after_round: Callable[[], object] = lambda: None,
) -> None:
    """Appends, in each round, the seconds and the bytes of a step with each technique in ``times`` and ``sent``.

    Seconds are of the slowest rank, bytes of the host that has sent most, and both are averages over the steps of a
    block. Every rank must call it, with the same techniques.
    """
    with ExitStack() as stack:
        blocks = {}
        for name in times:
            ranks.progress(f"{name}, unmeasured")
            technique = TECHNIQUES[name]
            training = technique.make(ranks, copy.deepcopy(model))
            stack.callback(training.close)
            for _ in range(technique.warm_ups):
                training.step(batch)
            blocks[name] = partial(measure_block, ranks, partial(training.step, batch), technique.interval, sent[name])
        ranks.take_turns("rounds", blocks, rounds, times, after_round)
    gc.collect()


def measure_block(ranks: Ranks, step: Callable[[], object], steps: int, sent: list[float]) -> float:
    """Returns the mean seconds of ``steps`` steps, and appends the bytes of one to ``sent``. All ranks must call it."""
    before = read_sent(COUNTERS.read_text())
    seconds = ranks.timed(step, steps)
    # What a rank has sent may wait in its host's queue until the others have received it.
    ranks.barrier()
    sent.append(ranks.slowest(most_sent(before, read_sent(COUNTERS.read_text())) / steps))
    return seconds


def read_sent(counters: str) -> dict[str, int]:
    """Returns the bytes that each network interface has sent, but for loopback, from the text of /proc/net/dev.

    These are the counters of /sys/class/net/*/statistics/tx_bytes, of the process's own network namespace.
    """
    rows = (line.partition(":") for line in counters.splitlines()[_FIRST_ROWS:])
    sent = {name.strip(): int(numbers.split()[_SENT]) for name, _, numbers in rows}
    return {name: nbytes for name, nbytes in sent.items() if name != "lo"}


def most_sent(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Returns the bytes that the busiest interface has sent between the two counts.

    It is no sum: what leaves through a bridge or a bond is counted on that, and again on the interface below.
    """
    return max((nbytes - before.get(name, 0) for name, nbytes in after.items()), default=0)


def main(names: list[str], rounds: int, model: str, rows: int) -> None:
    """Measures on CPUs, and prints what was measured so far after each round. Every rank of the job must call it."""
    init()
    ranks = Ranks(current_world(), "cpu")
    times: Samples = {name: [] for name in names}
    sent: Samples = {name: [] for name in names}

    def tell() -> None:
        if ranks.rank == 0:
            print(json.dumps({"times": times, "sent": sent}), flush=True)

    workload = WORKLOADS[model]
    batch = workload.batch(rows, 1 + ranks.rank, ranks.device)
    measure(ranks, workload.make(ranks.device), batch, rounds, times, sent, tell)
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
