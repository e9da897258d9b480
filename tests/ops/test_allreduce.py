"""allreduce and its grouped, asynchronous and in-place forms give what one process computes from all ranks' tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from samples import DTYPES, SHAPES, WHOLE, close, combined, sample
from torch import Tensor
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd

OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]
SIZES = [1, 2, pytest.param(3, marks=pytest.mark.slow), 4]


def in_place(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the tensors after asserting that they were overwritten and returned."""

    def call(tensors: list[Tensor], **options: Any) -> list[Tensor]:
        results = operation(tensors, **options)
        assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
        return tensors

    return call


def untouched(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the results after asserting that the tensors are unchanged."""

    def call(tensors: list[Tensor], **options: Any) -> Any:
        kept = [tensor.clone() for tensor in tensors]
        results = operation(tensors, **options)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, kept, strict=True))
        return results

    return call


def each(operation: Callable[..., Any]) -> Callable[..., list[Any]]:
    def call(tensors: list[Tensor], name: str, **options: Any) -> list[Any]:
        return [operation(tensor, name=f"{name}.{i}", **options) for i, tensor in enumerate(tensors)]

    return call


def waited(operation: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensors: list[Tensor], **options: Any) -> Any:
        handles = operation(tensors, **options)
        if isinstance(handles, hvd.Handle):
            return hvd.synchronize(handles)
        return [hvd.synchronize(handle) for handle in handles]

    return call


FORMS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "sync": untouched(each(hvd.allreduce)),
    "async": untouched(waited(each(hvd.allreduce_async))),
    "in place": in_place(each(hvd.allreduce_)),
    "async in place": in_place(waited(each(hvd.allreduce_async_))),
    "grouped": untouched(hvd.grouped_allreduce),
    "grouped async": untouched(waited(hvd.grouped_allreduce_async)),
    "grouped in place": in_place(hvd.grouped_allreduce_),
    "grouped async in place": in_place(waited(hvd.grouped_allreduce_async_)),
}


def check_forms(
    size: int,
    forms: Sequence[str],
    dtypes: Sequence[torch.dtype],
    ops: Sequence[hvd.ReduceOp],
    engine: str = "gloo",
) -> None:
    cases = [
        (form, dtype, op)
        for form in forms
        for dtype in dtypes
        for op in ops
        if not (dtype.is_complex and op in (hvd.Min, hvd.Max))
    ]

    def rank(number: int) -> list[Sequence[Tensor]]:
        return [
            FORMS[form]([sample(number, dtype, shape) for shape in SHAPES], name=f"{form} {dtype} {op}", op=op)
            for form, dtype, op in cases
        ]

    by_rank = run_worlds(size, rank, engine=engine)
    for case, (form, dtype, op) in enumerate(cases):
        for place, shape in enumerate(SHAPES):
            expected = combined(op, [sample(number, dtype, shape) for number in range(size)])
            first = by_rank[0][case][place]
            close(first, expected)
            assert all(torch.equal(results[case][place], first) for results in by_rank), (form, dtype, op, shape)


@pytest.mark.parametrize("size", SIZES)
def test_every_dtype_and_every_form_are_what_one_process_would_make_of_them(size):
    check_forms(size, ["grouped"], DTYPES, OPS)
    check_forms(size, ["async in place"], DTYPES, [hvd.Average])
    check_forms(size, list(FORMS), [torch.float32], [hvd.Sum])


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_op_and_form_in_shared_memory(size):
    check_forms(size, ["sync"], DTYPES, OPS, "shared memory")
    check_forms(size, list(FORMS), [torch.float32, torch.bfloat16], [hvd.Average], "shared memory")


@pytest.mark.parametrize("engine", ["gloo", "shared memory"])
def test_ranks_whose_tensors_lie_differently_or_are_overwritten_get_the_same_average(engine):
    def rank(number: int) -> list[Tensor]:
        values = torch.arange(6000.0).view(2, 3000) / 7 + number
        results = []
        for case in range(3):
            tensor = values.clone()
            if (number + case) % 3 == 1:
                tensor = values.t().contiguous().t()
            options = {"name": f"case {case}", "postscale_factor": 3.0}
            if (number + case) % 3 == 2:
                results.append(hvd.allreduce_(tensor, **options))
            else:
                results.append(hvd.allreduce(tensor, **options))
                assert torch.equal(tensor, values)
        return results

    by_rank = run_worlds(3, rank, engine=engine)
    terms = [torch.arange(6000.0).view(2, 3000) / 7 + number for number in range(3)]
    close(by_rank[0][0], 3 * combined(hvd.Average, terms))
    assert all(torch.equal(result, by_rank[0][0]) for results in by_rank for result in results)


@pytest.mark.night(but=12)
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", list(FORMS))
def test_every_op_in_every_form_and_dtype_at_every_dimension(size, form):
    check_forms(size, [form], DTYPES, OPS)


def test_averages_of_small_integers_do_not_wrap_and_are_truncated_towards_zero():
    def rank(number: int) -> list[list[int]]:
        big = [hvd.allreduce(torch.tensor([120 + number], dtype=dtype)).tolist() for dtype in WHOLE]
        return [*big, hvd.allreduce(torch.tensor([-3 - number * 2, 3 + number], dtype=torch.int32)).tolist()]

    assert run_worlds(2, rank) == [[[120]] * 5 + [[-4, 3]]] * 2


def test_factors_scale_what_goes_in_and_what_comes_out():
    def rank(number: int) -> list[list[float]]:
        options = {"prescale_factor": 0.5, "postscale_factor": 3.0}
        mine = torch.tensor([2.0, -6.0]) * (number + 1)
        whole = torch.tensor([3, -3]) * (number + 1)
        return [
            hvd.allreduce(mine, op=hvd.Sum, **options).tolist(),
            hvd.allreduce(mine, **options).tolist(),
            hvd.allreduce(mine, op=hvd.Max, **options).tolist(),
            hvd.allreduce(mine.half(), op=hvd.Product, **options).tolist(),
            hvd.allreduce(whole, op=hvd.Sum, **options).tolist(),
            hvd.allreduce_(mine, op=hvd.Min, prescale_factor=-1.0).tolist(),
        ]

    # Integers: 3 * 0.5 and 6 * 0.5 are truncated to 1 and 3 before the sum.
    expected = [[9.0, -27.0], [4.5, -13.5], [6.0, -9.0], [6.0, 54.0], [12, -12], [-4.0, 6.0]]
    assert run_worlds(2, rank) == [expected] * 2


def test_averages_overflow_no_sooner_than_their_terms():
    full = torch.tensor([60000.0], dtype=torch.float16)
    assert run_worlds(4, lambda rank: hvd.allreduce(full).item()) == [60000.0] * 4


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_the_same_bits_and_so_has_the_next_run(size):
    def rank(number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        mine = [torch.randn(1001, generator=generator).to(dtype) for dtype in (torch.float16, torch.float32)]
        mine[1][number] = float("nan")
        results = hvd.grouped_allreduce(mine) + [hvd.allreduce(t, op=op) for t in mine for op in (*OPS, hvd.Adasum)]
        return [result.view(torch.int16) for result in results]

    first, second = run_worlds(size, rank), run_worlds(size, rank)
    for results in [*first, *second]:
        assert all(torch.equal(got, kept) for got, kept in zip(results, first[0], strict=True))


def test_compression_is_what_travels_and_the_dtype_stays():
    def rank(number: int) -> tuple[torch.dtype, list[float]]:
        # Too fine for bfloat16; integers are not scaled.
        got = hvd.allreduce(torch.tensor([1.0 + number / 1024]), op=hvd.Sum, compression=hvd.Compression.bf16)
        whole = hvd.allreduce(torch.tensor([2**40 + 1]), op=hvd.Sum, compression=hvd.Compression.fp16)
        pair = hvd.grouped_allreduce([got, whole], op=hvd.Max, compression=hvd.Compression.fp16)
        return got.dtype, [got.item(), whole.item(), pair[0].item(), pair[1].item()]

    total = 2**41 + 2
    assert run_worlds(2, rank) == [(torch.float32, [2.0, total, 2.0, total])] * 2


def test_tensors_in_any_layout_are_served_in_place_too():
    def rank(number: int) -> None:
        base = torch.arange(24.0).reshape(2, 3, 4) * (number + 1)
        wanted = torch.arange(24.0).reshape(2, 3, 4) * 3
        for view, expected in [
            (base.clone().permute(2, 0, 1), wanted.permute(2, 0, 1)),
            (base.clone()[:, ::2, 1:], wanted[:, ::2, 1:]),
            (base.clone()[:, None].contiguous(memory_format=torch.channels_last), wanted[:, None]),
        ]:
            assert torch.equal(hvd.allreduce(view, op=hvd.Sum), expected)
            assert torch.equal(hvd.allreduce_(view, op=hvd.Sum), expected)
            assert torch.equal(view, expected)
        mirrored = torch.complex(base, base).conj()
        assert torch.equal(hvd.allreduce(mirrored, op=hvd.Sum), torch.complex(wanted, wanted).conj())
        expanded = torch.tensor(float(number)).expand(3)
        assert hvd.allreduce(expanded, op=hvd.Sum).tolist() == [1.0] * 3

    run_worlds(2, rank)


def test_parameters_and_tensors_of_inference_mode_can_be_overwritten():
    def rank(number: int) -> tuple[float, float]:
        parameter = torch.nn.Parameter(torch.tensor(float(number)))
        hvd.allreduce_(parameter)
        with torch.inference_mode():
            inferred = torch.tensor(float(number))
            hvd.allreduce_(inferred)
        return parameter.item(), inferred.item()

    assert run_worlds(2, rank) == [(0.5, 0.5)] * 2


def test_a_group_may_mix_dtypes_and_may_be_empty():
    def rank(number: int) -> list[Any]:
        mixed = hvd.grouped_allreduce([torch.tensor(number), torch.tensor(0.5), torch.tensor([3])], op=hvd.Sum)
        return [*[tensor.tolist() for tensor in mixed], hvd.grouped_allreduce([])]

    assert run_worlds(3, rank) == [[3, 1.5, [9], []]] * 3


@pytest.mark.parametrize("engine", ["gloo", "shared memory"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Adasum])
def test_large_tensors_of_a_group_are_what_each_is_by_itself_in_any_layout(engine, op):
    def rank(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        large, small = torch.randn(2, 2**17 + 3, generator=generator), torch.randn(5, generator=generator)
        if number == 1:
            large = large.t().contiguous().t()
        mine = [small, large, large.bfloat16(), 2 * large, 3 * small]
        alone = [hvd.allreduce(tensor, op=op) for tensor in mine]
        for form in (untouched(hvd.grouped_allreduce), in_place(hvd.grouped_allreduce_)):
            assert all(torch.equal(got, kept) for got, kept in zip(form(mine, op=op), alone, strict=True))

    run_worlds(2, rank, engine=engine)


@pytest.mark.parametrize("numel", [1000, 2**19])
@pytest.mark.parametrize("aliasing", [[0, 1], [0]], ids=["on all ranks", "on one rank"])
def test_a_tensor_that_is_in_a_group_twice_is_reduced_from_what_it_was_before(numel, aliasing):
    def rank(number: int) -> list[float]:
        first = torch.full((numel,), float(number + 1))
        second = first if number in aliasing else first.clone()
        # Half of it is in another one.
        wide = torch.full((2 * numel,), float(number + 1))
        parts = (
            [wide[:numel], wide[numel // 2 : numel // 2 + numel]]
            if number in aliasing
            else [first.clone() for _ in "ab"]
        )
        hvd.grouped_allreduce_([first, second, *parts], op=hvd.Sum)
        return [each.min().item() for each in (first, second, *parts)] + [each.max().item() for each in parts]

    assert run_worlds(2, rank, engine="shared memory") == [[3.0] * 6] * 2


def test_average_is_how_older_programs_say_the_op():
    def rank(number: int) -> list[float]:
        mine = torch.tensor(float(number))
        with pytest.warns(DeprecationWarning, match="`average` has been replaced with `op`"):
            total = hvd.allreduce(mine, average=False)
        with pytest.warns(DeprecationWarning, match="`average` has been replaced with `op`"):
            mean = hvd.synchronize(hvd.allreduce_async(mine, True))
        return [total.item(), mean.item()]

    assert run_worlds(1, rank) == [[0.0, 0.0]]
    with pytest.raises(ValueError, match=r"The op parameter supersedes average\. Please provide only one of them\."):
        run_worlds(1, lambda rank: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum))


@pytest.mark.parametrize("op", [3, hvd.ReduceOp.Min])
def test_an_op_may_be_given_as_horovods_number(op):
    assert run_worlds(2, lambda rank: hvd.allreduce(torch.tensor(rank + 1), op=op).item()) == [1, 1]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: hvd.allreduce(1.5, name="loss"), TypeError, "allreduce of 'loss': float is not a tensor"),
        (lambda: hvd.allreduce(torch.ones(2).to_sparse()), TypeError, "to_dense"),
        (lambda: hvd.allreduce(torch.ones(2), op="mean"), ValueError, "op='mean' is not one of hvd.Average"),
        (lambda: hvd.allreduce(torch.ones(2), prescale_factor="2"), TypeError, "prescale_factor='2' is not a number"),
        (lambda: hvd.allreduce(torch.ones(2), postscale_factor=None), TypeError, "postscale_factor=None is not a"),
        (
            lambda: hvd.allreduce(torch.ones(2), postscale_factor=math.nan),
            ValueError,
            "postscale_factor=nan is not finite",
        ),
        (lambda: hvd.allreduce(torch.ones(2, device="meta")), ValueError, "on the meta device and has no values"),
        (lambda: hvd.allreduce(torch.ones(2), name=3), TypeError, "name=3 is not a str"),
        (lambda: hvd.allreduce(torch.ones(2), compression="fp16"), TypeError, "compression='fp16'"),
        (lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Min), ValueError, "have no order"),
        (lambda: hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum), ValueError, "Adasum needs floats"),
        (lambda: hvd.allreduce(torch.ones(2).to(torch.float8_e5m2)), ValueError, "Tensor type .* is not supported"),
        (lambda: hvd.grouped_allreduce(torch.ones(2)), TypeError, "Tensor is not a list of tensors"),
        (lambda: hvd.grouped_allreduce([torch.ones(2), None]), TypeError, "tensor 1: NoneType is not a tensor"),
    ],
)
def test_wrong_arguments_are_named(call, error, words):
    (outcome,) = attempt_worlds(1, lambda rank: call())
    with pytest.raises(error, match=words):
        raise outcome


def test_a_name_in_the_place_of_horovods_average_is_told_its_keyword(recwarn):
    hvd.init()
    with pytest.raises(ValueError, match=r"pass name='loss'$"):
        hvd.allreduce(torch.tensor(1.0), "loss")
    assert not recwarn.list
