"""A rank that has joined takes part in the all-reduces of the others and changes nothing."""

from __future__ import annotations

import pytest
import torch
from samples import DTYPES, close, combined, sample
from torch import Tensor
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.ops.allreduce import stand_in
from hvdlite.runtime.world import current_world

OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]


def join() -> None:
    current_world().controller.join(average_of_active=True, stand_in=stand_in, sit_out=lambda *_: None).wait()


def test_the_others_get_what_they_would_get_among_themselves():
    def rank(number: int) -> list[Tensor]:
        results = []
        for dtype in DTYPES if number != 1 else []:
            for op in OPS:
                if dtype.is_complex and op in (hvd.Min, hvd.Max):
                    continue
                mine = [sample(number, dtype, shape) for shape in ((2, 3), ())]
                results += hvd.grouped_allreduce(mine, name=f"{dtype}{op}", op=op)
        if number != 1:
            options = {"op": hvd.Max, "prescale_factor": -1.0, "compression": hvd.Compression.fp16}
            results.append(hvd.allreduce(torch.tensor([-2.0, 3.0]) - number, **options))
            results.append(hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum))
        join()
        return results

    first, none, second = run_worlds(3, rank)
    assert none == []
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    results = iter(first)
    for dtype in DTYPES:
        for op in OPS:
            if not (dtype.is_complex and op in (hvd.Min, hvd.Max)):
                for shape in ((2, 3), ()):
                    close(next(results), combined(op, [sample(number, dtype, shape) for number in (0, 2)]))
    assert next(results).tolist() == [4.0, -1.0]
    assert next(results).tolist() == pytest.approx([1.0, 2.0])


class Own:
    """A compression of the other ranks, which the rank that has joined does not have."""

    def compress(self, buffer: Tensor) -> Tensor:
        return buffer

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        return


def test_a_compression_of_the_users_own_is_an_error_once_a_rank_has_joined():
    def rank(number: int) -> str:
        if number == 0:
            assert hvd.allreduce(torch.ones(2), name="before", compression=Own()).tolist() == [1.0, 1.0]
            with pytest.raises(
                ValueError, match=r"allreduce of 'loss': a rank that has called .* cannot take part"
            ) as error:
                hvd.allreduce(torch.ones(2), name="loss", compression=Own())
            join()
            return str(error.value)
        hvd.allreduce(torch.ones(2), name="before", compression=Own())
        join()
        return ""

    told, _ = attempt_worlds(2, rank)
    assert "Own" in told
