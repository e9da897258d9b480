"""
`ReduceOp`: `Average`, `Sum` and the others, in Horovod's numbers.

`OP_OF_ENGINE` has those that engines do by themselves; the rest is built from them, in `ops.reduction`.
"""

from __future__ import annotations

from enum import IntEnum

import torch.distributed as dist


class ReduceOp(IntEnum):
    """How an all-reduce combines the ranks; the numbers are Horovod's."""

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

# What engines can do by themselves; the rest is made of it.
OP_OF_ENGINE = {
    Sum: dist.ReduceOp(dist.ReduceOp.SUM),
    Min: dist.ReduceOp(dist.ReduceOp.MIN),
    Max: dist.ReduceOp(dist.ReduceOp.MAX),
    Product: dist.ReduceOp(dist.ReduceOp.PRODUCT),
}
