"""
`ReduceOp`: `Average`, `Sum` and the others, with Horovod's numbers.

All engines provide the ops in `OP_OF_ENGINE`, and one-pass engines also average floats. `ops` builds the rest.
"""

from __future__ import annotations

from enum import IntEnum

import torch.distributed as dist


class ReduceOp(IntEnum):
    """The operation by which an all-reduce combines the ranks' values; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

# The ops that engines provide.
OP_OF_ENGINE = {
    Sum: dist.ReduceOp(dist.ReduceOp.SUM),
    Min: dist.ReduceOp(dist.ReduceOp.MIN),
    Max: dist.ReduceOp(dist.ReduceOp.MAX),
    Product: dist.ReduceOp(dist.ReduceOp.PRODUCT),
}
