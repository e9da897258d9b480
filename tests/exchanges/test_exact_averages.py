"""An average is the exact sum, divided: of equal tensors it is that very tensor, and of others what NumPy computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import ENGINES, run_ranks, set_of
from torch import Tensor, nn
from training import wrap
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm import hierarchy
from hvdlite.comm.group import Group
from hvdlite.comm.hierarchy import HierarchicalEngineFactory, host_groups_of
from hvdlite.ops.reduction import Reduction

SIZES = [1, 2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5, 6)), 7,
         pytest.param(8, marks=pytest.mark.slow)]  # fmt: skip
FLOATS = [torch.float32, torch.float64, torch.complex64, torch.complex128]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

engines = pytest.mark.parametrize("engine", list(ENGINES))


def with_room(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Random numbers of every exponent that leave room for a sum of eight.

    Of so few bits that each multiple up to the eightfold is exact: the sum of three equal ones that use all bits is
    itself rounded, whoever adds them up. 20 of float32's 24, 49 of float64's 53.
    """
    generator = torch.Generator().manual_seed(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min // 8, limits.max // 8, (numel,), generator=generator).to(dtype)
    real = dtype.to_real()
    bits, exponents = (20, (-149, 105)) if real is torch.float32 else (49, (-1074, 970))
    count = numel * (2 if dtype.is_complex else 1)
    digits = torch.randint(-(2**bits) + 1, 2**bits, (count,), generator=generator).double()
    powers = torch.randint(exponents[0], exponents[1], (count,), generator=generator).double()
    values = torch.ldexp(digits, powers).to(real)
    return torch.view_as_complex(values.view(-1, 2)) if dtype.is_complex else values


def same_bits(got: Tensor, expected: Tensor) -> bool:
    if got.is_complex():
        got, expected = torch.view_as_real(got.resolve_conj()), torch.view_as_real(expected)
    return got.dtype == expected.dtype and got.numpy().tobytes() == expected.contiguous().numpy().tobytes()


def any_float(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def require_average(got: Tensor, terms: list[Tensor], *, in_rank_order: bool) -> None:
    """Asserts that it is the quotient of the sum in rank order, or in another order, which may round otherwise."""
    got, *terms = [torch.view_as_real(each) if each.is_complex() else each for each in (got, *terms)]
    total = terms[0].numpy().copy()
    for term in terms[1:]:
        total += term.numpy()
    expected = torch.from_numpy(total / total.dtype.type(len(terms)))
    if in_rank_order:
        assert same_bits(got, expected)
    else:
        most = torch.stack([term.abs() for term in terms]).sum(0).max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=most * torch.finfo(got.dtype).eps)


@pytest.mark.night(but=4)
@engines
@pytest.mark.parametrize("size", SIZES)
def test_the_average_of_equal_tensors_is_that_tensor_in_every_bit(size, engine):
    dtypes = [*FLOATS, *WHOLE]
    tensors = [with_room(seed, numel, dtype) for seed, dtype in enumerate(dtypes) for numel in (1, 1000, 5003)]
    names = [str(number) for number in range(len(tensors))]

    def rank(number: int) -> None:
        results = [hvd.allreduce(tensor, name=name) for tensor, name in zip(tensors, names, strict=True)]
        results += hvd.grouped_allreduce(tensors, name="group")
        handles = [hvd.allreduce_async_(tensor.clone(), name=name) for tensor, name in zip(tensors, names, strict=True)]
        results += [hvd.synchronize(handle) for handle in handles]
        assert all(same_bits(got, tensor) for got, tensor in zip(results, tensors * 3, strict=True))

    run_worlds(size, rank, engine=engine)


@pytest.mark.night(but=4)
@engines
@pytest.mark.parametrize("size", SIZES)
def test_so_it_is_of_what_is_scattered(size, engine):
    tensors = [with_room(seed, 1000, dtype) for seed, dtype in enumerate([*FLOATS, *WHOLE])]

    def rank(number: int) -> None:
        results = [hvd.reducescatter(tensor, name=str(place)) for place, tensor in enumerate(tensors)]
        results += hvd.grouped_reducescatter(tensors, name="group")
        counts = [1000 // size + (place < 1000 % size) for place in range(size)]
        mine = [tensor.split(counts)[number] for tensor in tensors]
        assert all(same_bits(got, expected) for got, expected in zip(results, mine * 2, strict=True))

    run_worlds(size, rank, engine=engine)


def gradients(group_or_set: Any, values: list[Tensor], **options: Any) -> list[Tensor]:
    """Returns the averages that the optimizer computes of this rank's gradients ``values``."""
    params = [nn.Parameter(torch.zeros_like(value)) for value in values]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0), process_set=group_or_set, **options)
    # The first is a gradient that autograd has made; the second is added to it in place.
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none)
        torch.autograd.backward(params, values)
        optimizer.synchronize()
    found = [param.grad.clone() for param in params]
    optimizer.close()
    return found


@pytest.mark.night(but=4)
@engines
@pytest.mark.parametrize("size", SIZES)
def test_so_it_is_of_gradients(size, engine):
    values = [with_room(seed, numel, dtype) for seed, dtype in enumerate(FLOATS) for numel in (1, 700, 5003)]

    def rank(group: Group) -> None:
        for options in ({}, {"bucket_cap_mb": 0.001}):
            found = gradients(set_of(group), values, **options)
            assert all(same_bits(got, value) for got, value in zip(found, values, strict=True))

    run_ranks(size, rank, engine=engine)


@engines
@pytest.mark.parametrize("size", [2, 3, 7])
def test_so_it_is_of_sparse_gradients_and_of_a_step_on_arrival(size, engine):
    rows = with_room(5, 12, torch.float32).view(3, 4)

    def rank(group: Group) -> None:
        for options in ({}, {"sparse_as_dense": True}, {"step_on_arrival": True}):
            table = nn.Embedding(5, 4, sparse=True)
            before = torch.zeros(5, 4)
            with torch.no_grad():
                table.weight.zero_()
            optimizer = wrap(group, table.parameters(), **options)
            for _ in range(2):
                optimizer.zero_grad()
                table(torch.tensor([4, 0, 2])).backward(rows)
                optimizer.step()
                before[torch.tensor([4, 0, 2])] -= rows
            assert same_bits(table.weight.detach(), before)
            optimizer.close()

    run_ranks(size, rank, engine=engine)


@pytest.mark.slow(but=1)
@engines
@pytest.mark.parametrize("size", [2, 3, 7])
def test_averages_are_quotients_of_sums_in_rank_order_where_the_engine_keeps_that_order(size, engine):
    # A sum of two terms does not depend on their order.
    in_rank_order = engine == "shared memory" or size == 2
    cases = [(dtype, numel) for dtype in FLOATS for numel in (3, 5000)]

    def rank(number: int) -> None:
        for dtype, numel in cases:
            terms = [any_float(source, numel, dtype) for source in range(size)]
            got = hvd.allreduce(terms[number], name=f"{dtype} {numel}")
            require_average(got, terms, in_rank_order=in_rank_order)
            (got,) = hvd.grouped_reducescatter([terms[number].repeat(size)], name=f"{dtype} {numel}")
            # Each rank sums its own rows, of which it has all terms.
            require_average(got, terms, in_rank_order=True)
            (got,) = gradients(hvd.global_process_set, [terms[number]])
            require_average(got, terms, in_rank_order=in_rank_order)

    run_worlds(size, rank, engine=engine)


def test_so_it_is_within_hosts_and_between_them(monkeypatch):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)
    values = [with_room(seed, 1001, dtype) for seed, dtype in enumerate(FLOATS)]

    def rank(group: Group) -> None:
        places = host_groups_of(group.rank, "aaabbb")
        assert places is not None
        engine_factory = HierarchicalEngineFactory(group._engine_factory, None, places, group.rank, "test", {"cpu"})
        engine = engine_factory.open()
        levels = group.duplicate()
        levels.change_engines(group._engine_factory, engine)
        for value in values:
            flat = value.clone()
            Reduction(hvd.Average).all_reduce(levels, flat, [1001], 6, "an average")
            assert same_bits(flat, value)
        engine.close()

    run_ranks(6, rank)


def test_a_sum_is_divided_first_and_scaled_then():
    # 7 / 3 * 3 and 7 * 3 / 3 differ, and so do 1.5 * x / 3 and x * (1.5 / 3).
    terms = [any_float(source, 500, torch.float32) for source in range(3)]

    def rank(number: int) -> None:
        got = hvd.allreduce(terms[number], prescale_factor=0.7, postscale_factor=3.0)
        scaled = [term * 0.7 for term in terms]
        assert same_bits(got, (scaled[0] + scaled[1] + scaled[2]) / 3 * 3.0)
        whole = [torch.tensor([7, -7, 2**60 + 1]) * (source + 1) // 2 for source in range(3)]
        got = hvd.allreduce(whole[number], postscale_factor=2.5, name="whole")
        quotient = torch.div(sum(whole), 3, rounding_mode="trunc")
        assert torch.equal(got, (quotient.double() * 2.5).long())
        (got,) = gradients(hvd.global_process_set, [terms[number]], gradient_predivide_factor=2.5)
        early = [term * (1 / 2.5) for term in terms]
        assert same_bits(got, (early[0] + early[1] + early[2]) * (2.5 / 3))

    run_worlds(3, rank, engine="shared memory")


@engines
@pytest.mark.parametrize("average", ["all", "active"])
def test_the_sum_of_those_that_have_not_joined_is_divided_by_all_or_by_them(average, engine):
    size, steps = 4, 2
    values = [any_float(seed, 600, dtype) for seed, dtype in enumerate(FLOATS)]

    def rank(number: int) -> list[list[Tensor]]:
        mine = [value * (number + 1) for value in values]
        params = [nn.Parameter(torch.zeros_like(value)) for value in values]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0))
        seen = []
        for step in range(steps if number < 3 else 0):
            optimizer.zero_grad()
            torch.autograd.backward(params, mine)
            optimizer.synchronize()
            reduced = hvd.grouped_allreduce(mine, name=f"step {step}")
            seen.append([*(param.grad.clone() for param in params), *reduced])
            with optimizer.skip_synchronize():
                optimizer.step()
        hvd.join(average=average)
        return seen

    outcomes = run_worlds(size, rank, engine=engine)
    divisor = size if average == "all" else 3
    for place, value in enumerate(values):
        # No rank is known to have joined before the end of the first step, but by the last step rank 1 has.
        total = value + value * 2 + value * 3
        for seen in outcomes[:3]:
            for where in (place, place + len(values)):
                got = seen[-1][where]
                assert same_bits(got, outcomes[0][-1][where])
                expected = torch.view_as_real(total) / divisor if total.is_complex() else total / divisor
                real = torch.view_as_real(got) if got.is_complex() else got
                if engine == "shared memory":
                    assert same_bits(real, expected)
                else:
                    torch.testing.assert_close(real, expected, rtol=0, atol=8 * total.abs().max().item() * 2**-24)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_what_travels_in_16_bits_is_scaled_before_and_does_not_overflow(compression):
    dtype = torch.float16 if compression is hvd.Compression.none else torch.float32

    def rank(number: int) -> list[float]:
        full = torch.full((3,), 60000.0, dtype=dtype)
        found = [hvd.allreduce(full, compression=compression), hvd.reducescatter(full, compression=compression)]
        found += gradients(hvd.global_process_set, [full], compression=compression)
        return [each[0].item() for each in found]

    for results in run_worlds(3, rank):
        assert results == pytest.approx([60000.0] * 3, rel=1e-3)


def test_gradients_that_were_added_to_in_place_and_new_ones_are_scaled_once_each():
    def rank(group: Group) -> list[list[float]]:
        first, later = (nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2))
        optimizer = wrap(group, [first, later])
        first.sum().backward()
        optimizer.step()
        # The gradient stays where it is sent from, and autograd adds the next one to it; the other's is new memory.
        optimizer.zero_grad(set_to_none=False)
        ((first + later) * (1.0 + group.rank)).sum().backward()
        optimizer.synchronize()
        return [first.grad.tolist(), later.grad.tolist()]

    assert run_ranks(2, rank) == [[[1.5] * 3] * 2] * 2
