"""Adasum gives what the formula of its paper (arXiv 2006.02924) gives, which is implemented here a second time."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.ops.adasum import adasum_all_reduce


def pair(a: Tensor, b: Tensor) -> Tensor:
    """(1 - a.b / 2|a|²) a + (1 - a.b / 2|b|²) b; for a vector of zeros a.b is 0 and the quotient counts as 0."""
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def reference(vectors: list[Tensor]) -> Tensor:
    """Combines the vectors along a binary tree; one without a partner on a level goes up unchanged."""
    level = [vector.double() for vector in vectors]
    while len(level) > 1:
        level = [pair(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


def vector(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, *[pytest.param(size, marks=pytest.mark.slow) for size in (5, 6, 8)]])
def test_any_number_of_ranks_gives_what_the_formula_gives(size):
    def rank(number):
        results = []
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for numel in (0, 1, 3, 50):
                results.append(hvd.allreduce(vector(number, numel).to(dtype), op=hvd.Adasum))
        return results

    by_rank = run_worlds(size, rank)
    for place, got in enumerate(by_rank[0]):
        assert all(torch.equal(results[place], got) for results in by_rank)
        expected = reference([vector(number, got.numel()).to(got.dtype) for number in range(size)])
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[got.dtype]
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_segment_has_dot_products_of_its_own_wherever_slices_are_cut(size):
    segments = [3, 0, 5, 1, 4]

    def rank(group):
        flat = vector(group.rank, sum(segments))
        adasum_all_reduce(group, flat, segments, "test")
        return flat

    by_segment = zip(*(vector(number, sum(segments)).split(segments) for number in range(size)), strict=True)
    expected = [reference(list(parts)) for parts in by_segment]
    for got in run_ranks(size, rank):
        torch.testing.assert_close(got, torch.cat(expected))


def test_parallel_vectors_are_averaged_and_orthogonal_ones_added():
    def rank(number):
        same = hvd.allreduce(torch.tensor([2.0, 4.0]), op=hvd.Adasum)
        apart = torch.zeros(4)
        apart[number] = number + 1.0
        return same.tolist(), hvd.allreduce(apart, op=hvd.Adasum).tolist()

    for size in (2, 3, 4):
        for same, apart in run_worlds(size, rank):
            assert same == pytest.approx([2.0, 4.0])
            assert apart == pytest.approx([1.0, 2.0, 3.0, 4.0][:size] + [0.0] * (4 - size))


def test_zeros_and_vectors_that_cancel_leave_the_others_as_they_are():
    rows = {
        "all zero": [[0.0, 0.0]] * 4,
        "one zero": [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]],
        "opposite": [[1.0, 3.0], [-1.0, -3.0], [0.3, 0.1], [0.0, 0.0]],
    }

    def rank(number):
        return [hvd.allreduce(torch.tensor(rows[case][number]), op=hvd.Adasum).tolist() for case in rows]

    for zero, one, opposite in run_worlds(4, rank):
        assert zero == [0.0, 0.0]
        assert one == pytest.approx([1.0, 2.0])
        assert opposite == pytest.approx([0.3, 0.1])


def test_tensors_of_a_group_are_kept_apart_and_complex_ones_are_pairs_of_numbers():
    def rank(number):
        mine = [vector(number, 4).reshape(2, 2), vector(number + 10, 3), torch.complex(*vector(number, 6).split(3))]
        return hvd.grouped_allreduce(mine, op=hvd.Adasum, prescale_factor=2.0, postscale_factor=0.5)

    for a, b, c in run_worlds(3, rank):
        torch.testing.assert_close(a.reshape(-1), reference([vector(n, 4) for n in range(3)]))
        torch.testing.assert_close(b, reference([vector(n + 10, 3) for n in range(3)]))
        torch.testing.assert_close(torch.cat([c.real, c.imag]), reference([vector(n, 6) for n in range(3)]))


def test_adasum_may_travel_compressed():
    results = run_worlds(
        3, lambda rank: hvd.allreduce(vector(rank, 9), op=hvd.Adasum, compression=hvd.Compression.bf16)
    )
    expected = reference([vector(n, 9).bfloat16() for n in range(3)])
    torch.testing.assert_close(results[0], expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(results[0], results[2])
