"""The gradients of the collectives are those of Horovod: each formula is written out here, from all ranks' values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.runtime.world import current_world

SHAPE = (5, 2)
FACTORS = {"prescale_factor": 0.5, "postscale_factor": 3.0}


@pytest.fixture(params=["gloo", "shared memory"])
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "shared memory":
        monkeypatch.setattr(ranks, "ThreadEngineFactory", ranks.SharedEngineFactory)


def start(rank: int, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def weights(shape: Sequence[int], rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns the gradient of the loss for a result of this shape: it differs by rank and element."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(tuple(shape), generator=generator, dtype=dtype)


def mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def spread(rows: int, size: int) -> list[int]:
    return [len(range(rank, rows, size)) for rank in range(size)]


def rows_of(tensor: Tensor, counts: Sequence[int], place: int) -> Tensor:
    return tensor[sum(counts[:place]) : sum(counts[: place + 1])]


def rows_to(sender: int, receiver: int) -> int:
    """Returns how many rows one rank sends to another in an all-to-all: different numbers, some 0."""
    return (2 * sender + receiver) % 3


def sent(place: int, size: int) -> list[int]:
    return [rows_to(place, other) for other in range(size)]


@dataclass
class Case:
    """What a rank calls, at its place among so many, and what the gradient of its tensor is to be.

    ``gradient`` is told what has come back on all of them for each result, by place, and the place.
    """

    call: Callable[..., Any]
    gradient: Callable[..., list[Tensor]]
    shapes: Callable[[int, int], list[Sequence[int]]] = field(default=lambda place, size: [SHAPE])


def even_alltoall(back: Sequence[Sequence[Tensor]], place: int) -> list[Tensor]:
    size = len(back)
    return [torch.cat([rows_of(grads[0], [2] * size, place) for grads in back])]


def uneven_alltoall(back: Sequence[Sequence[Tensor]], place: int) -> list[Tensor]:
    size = len(back)
    parts = [
        rows_of(grads[0], [rows_to(sender, other) for sender in range(size)], place) for other, grads in enumerate(back)
    ]
    # One row was left over, and was sent to no rank.
    return [torch.cat([*parts, torch.zeros(1, 2, dtype=torch.float64)])]


def allreduced(combine: Callable[[Sequence[Tensor]], Tensor]) -> Callable[..., list[Tensor]]:
    return lambda back, place: [combine(grads) for grads in zip(*back, strict=True)]


def extreme(combine: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    return lambda tensors: combine(torch.stack(list(tensors)))


CASES: dict[str, Case] = {
    "average": Case(lambda xs, place, size, **o: hvd.allreduce(xs[0], **o), allreduced(mean)),
    "sum": Case(lambda xs, place, size, **o: hvd.allreduce(xs[0], op=hvd.Sum, **o), allreduced(total)),
    "scaled average": Case(
        lambda xs, place, size, **o: hvd.allreduce(xs[0], **FACTORS, **o), allreduced(lambda g: 1.5 * mean(g))
    ),
    "scaled sum": Case(
        lambda xs, place, size, **o: hvd.allreduce(xs[0], op=hvd.Sum, **FACTORS, **o),
        allreduced(lambda g: 1.5 * total(g)),
    ),
    "minimum": Case(
        lambda xs, place, size, **o: hvd.allreduce(xs[0], op=hvd.Min, prescale_factor=-2.0, **o),
        allreduced(extreme(lambda g: (-2 * g).amin(0))),
    ),
    "maximum": Case(
        lambda xs, place, size, **o: hvd.allreduce(xs[0], op=hvd.Max, **FACTORS, **o),
        allreduced(extreme(lambda g: 3 * (g / 2).amax(0))),
    ),
    "product": Case(
        lambda xs, place, size, **o: hvd.allreduce(xs[0], op=hvd.Product, **FACTORS, **o),
        allreduced(extreme(lambda g: 3 * (g / 2).prod(0))),
    ),
    "group": Case(
        lambda xs, place, size, **o: hvd.grouped_allreduce(xs, op=hvd.Sum, **FACTORS, **o),
        allreduced(lambda g: 1.5 * total(g)),
        lambda place, size: [(), (4, 0), (3,)],
    ),
    "group of products": Case(
        lambda xs, place, size, **o: hvd.grouped_allreduce(xs, op=hvd.Product, **o),
        allreduced(extreme(lambda g: g.prod(0))),
        lambda place, size: [(2, 2), (3,)],
    ),
    "allgather": Case(
        lambda xs, place, size, **o: hvd.allgather(xs[0], **o),
        lambda back, place: [rows_of(mean([g[0] for g in back]), range(len(back)), place)],
        lambda place, size: [(place, 2)],
    ),
    "allgather of scalars": Case(
        lambda xs, place, size, **o: hvd.allgather(xs[0], **o),
        lambda back, place: [mean([g[0] for g in back])[place]],
        lambda place, size: [()],
    ),
    "grouped allgather": Case(
        lambda xs, place, size, **o: hvd.grouped_allgather(xs, **o),
        lambda back, place: [
            rows_of(mean([g[0] for g in back]), range(len(back)), place),
            rows_of(mean([g[1] for g in back]), [3 - other % 3 for other in range(len(back))], place),
        ],
        lambda place, size: [(place, 2), (3 - place % 3,)],
    ),
    "broadcast": Case(
        # The root is the last member, by its global rank.
        lambda xs, place, size, **o: hvd.broadcast(xs[0], hvd.size() - 1, **o),
        lambda back, place: [mean([g[0] for g in back]) * (place == len(back) - 1)],
    ),
    "alltoall": Case(
        lambda xs, place, size, **o: hvd.alltoall(xs[0], **o), even_alltoall, lambda place, size: [(2 * size, 2)]
    ),
    "uneven alltoall": Case(
        lambda xs, place, size, **o: hvd.alltoall(xs[0], splits=sent(place, size), **o)[0],
        uneven_alltoall,
        lambda place, size: [(sum(sent(place, size)) + 1, 2)],
    ),
    "reducescatter": Case(
        lambda xs, place, size, **o: hvd.reducescatter(xs[0], **FACTORS, **o),
        lambda back, place: [1.5 * torch.cat([g[0] for g in back])],
    ),
    "reducescatter of a sum": Case(
        lambda xs, place, size, **o: hvd.reducescatter(xs[0], op=hvd.Sum, **FACTORS, **o),
        lambda back, place: [1.5 * len(back) * torch.cat([g[0] for g in back])],
    ),
    "grouped reducescatter": Case(
        lambda xs, place, size, **o: hvd.grouped_reducescatter(xs, op=hvd.Sum, **o),
        lambda back, place: [len(back) * torch.cat([g[number] for g in back]) for number in range(2)],
        lambda place, size: [(3, 2), (5,)],
    ),
}


def result_of(case: Case, tensors: list[Tensor], place: int, size: int, **options: Any) -> list[Tensor]:
    result = case.call(tensors, place, size, **options)
    return [result] if isinstance(result, Tensor) else list(result)


def check_all(size: int, members: Sequence[int]) -> None:
    """Runs every case on these ranks of this many."""
    count = len(members)

    def rank(own: int) -> dict[str, Any]:
        options = {}
        if count < size:
            options["process_set"] = hvd.add_process_set(members)
        outcomes: dict[str, Any] = {}
        if own not in members:
            # Every rank makes the set, also one that is no member.
            hvd.barrier()
            return outcomes
        for name, case in CASES.items():
            place = members.index(own)
            xs = [start(own, shape) for shape in case.shapes(place, count)]
            ys = result_of(case, xs, place, count, **options)
            back = [weights(y.shape, own) for y in ys]
            torch.autograd.backward(ys, [grad.clone() for grad in back])
            outcomes[name] = back, [x.grad for x in xs]
        hvd.barrier()
        return outcomes

    by_rank = run_worlds(size, rank)
    for name, case in CASES.items():
        back = [by_rank[member][name][0] for member in members]
        for place, member in enumerate(members):
            for got, wanted in zip(by_rank[member][name][1], case.gradient(back, place), strict=True):
                torch.testing.assert_close(got, wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_horovods(size):
    check_all(size, range(size))


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("members", [[0, 2], [1, 2], [2]])
def test_in_a_process_set_its_size_counts(members):
    check_all(3, members)


def test_that_of_adasum_is_the_adasum_of_the_gradients():
    def rank(own: int) -> tuple[Tensor, Tensor]:
        x = start(own)
        hvd.allreduce(x, op=hvd.Adasum).backward(weights(SHAPE, own))
        return x.grad, hvd.allreduce(weights(SHAPE, own), op=hvd.Adasum)

    for got, wanted in run_worlds(4, rank):
        assert torch.equal(got, wanted)


class Halved:
    """A user's compression."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return (tensor * 2).to(ctx)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_gradients_travel_in_the_dtype_that_the_values_do(compression):
    def rank(own: int) -> tuple[Tensor, ...]:
        x, y = start(own, dtype=torch.float32), start(own, (4, 2), dtype=torch.float32)
        grad = weights(SHAPE, own, torch.float32)
        hvd.allreduce(x, op=hvd.Sum, compression=compression).backward(grad)
        hvd.reducescatter(y, compression=compression, postscale_factor=3.0).backward(grad[:2])
        return grad, x.grad, y.grad

    outcomes = run_worlds(2, rank)
    dtype = compression.dtype
    for _, of_allreduce, of_reducescatter in outcomes:
        assert torch.equal(of_allreduce, total([grad.to(dtype) for grad, _, _ in outcomes]).float())
        assert torch.equal(of_reducescatter, (3.0 * torch.cat([grad[:2].to(dtype) for grad, _, _ in outcomes])).float())


def test_with_a_compression_of_ones_own_there_are_gradients_too():
    def rank(own: int) -> tuple[Tensor, Tensor]:
        x, y = start(own, dtype=torch.float32), start(own, (4, 2), dtype=torch.float32)
        hvd.allreduce(x, op=hvd.Sum, compression=Halved).backward(torch.ones(SHAPE))
        hvd.reducescatter(y, compression=Halved).backward(torch.ones(2, 2))
        return x.grad, y.grad

    for of_allreduce, of_reducescatter in run_worlds(2, rank):
        assert torch.equal(of_allreduce, torch.full(SHAPE, 2.0))
        assert torch.equal(of_reducescatter, torch.ones(4, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex128])
def test_gradients_have_the_tensors_dtype(dtype):
    def rank(own: int) -> list[Tensor]:
        grads = []
        for call in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.reducescatter, hvd.alltoall):
            x = start(own, (4, 2), dtype)
            y = call(x)
            y.backward(torch.ones_like(y))
            grads.append(x.grad)
        return grads

    by_rank = run_worlds(2, rank)
    for own, grads in enumerate(by_rank):
        assert [grad.dtype for grad in grads] == [dtype] * 5
        assert [set(grad.flatten().tolist()) for grad in grads] == [{1}, {1}, {1 - own}, {1}, {1}]


def test_integers_in_a_group_have_none_and_the_others_have():
    def rank(own: int) -> tuple[Any, ...]:
        x, whole, y = start(own), torch.tensor([own]), start(own + 10)
        results = hvd.grouped_allreduce([x, whole, y], op=hvd.Sum)
        # The gradient of y only: zeros count for the other results.
        results[2].sum().backward()
        return results[1].tolist(), x.grad, y.grad

    for summed, of_x, of_y in run_worlds(2, rank):
        assert summed == [1]
        assert torch.equal(of_x, torch.zeros(SHAPE, dtype=torch.float64))
        assert torch.equal(of_y, torch.full(SHAPE, 2.0, dtype=torch.float64))


@pytest.mark.parametrize("name", CASES)
def test_gradients_can_be_differentiated_again_by_the_same_rule(name):
    case, size = CASES[name], 2

    def gradient(tensors: list[Tensor], place: int) -> list[Tensor]:
        """With what comes back made of the tensors of a second, so that there is something to differentiate."""
        xs = [start(place, shape) for shape in case.shapes(place, size)]
        ys = result_of(case, xs, place, size)
        return list(torch.autograd.grad(ys, xs, tensors, create_graph=True))

    def rank(place: int) -> tuple[list[Tensor], list[Tensor], list[Sequence[int]]]:
        with torch.no_grad():
            shapes = [y.shape for y in result_of(case, [start(0, s) for s in case.shapes(place, size)], place, size)]
        # The first derivative is a collective of the incoming gradient; this is the gradient of that collective.
        came_back = [weights(shape, place).requires_grad_() for shape in shapes]
        firsts = gradient(came_back, place)
        once_more = [weights(first.shape, place + 10) for first in firsts]
        torch.autograd.backward(firsts, once_more)
        return once_more, [grad.grad for grad in came_back], shapes

    back = run_worlds(size, rank)
    for place, (_, seconds, shapes) in enumerate(back):
        wanted = second_of(name, [grads for grads, _, _ in back], place, shapes)
        for got, expected in zip(seconds, wanted, strict=True):
            torch.testing.assert_close(got, expected)


def second_of(name: str, back: Sequence[Sequence[Tensor]], place: int, shapes: list[Sequence[int]]) -> list[Tensor]:
    """Returns the rule of the first derivative, where that is another operation than the operation itself."""
    size = len(back)
    if name == "broadcast":
        # An average, of which only the root has used the result.
        return [back[size - 1][0] / size]
    if "allgather" in name:
        # A reduce-scatter of an average: gathered.
        return [torch.cat([g[number].reshape(-1, *shapes[number][1:]) for g in back]) for number in range(len(shapes))]
    if "reducescatter" in name:
        # Multiplied by a factor and gathered: the average's own rows, times that factor.
        factor = {"reducescatter": 1.5, "reducescatter of a sum": 1.5 * size, "grouped reducescatter": size}[name]
        counts = [spread(len(grad), size) for grad in back[0]]
        return [
            factor * rows_of(mean([g[number] for g in back]), counts[number], place) for number in range(len(shapes))
        ]
    if name == "uneven alltoall":
        return [torch.cat([rows_of(grads[0], sent(sender, size), place) for sender, grads in enumerate(back)])]
    return CASES[name].gradient(back, place)


def test_a_second_derivative_of_a_loss_that_is_no_line():
    def rank(own: int) -> tuple[float, float]:
        x = torch.tensor(own + 1.0, requires_grad=True)
        (grad,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum) ** 3, x, create_graph=True)
        (second,) = torch.autograd.grad(grad, x)
        return grad.item(), second.item()

    # s = 3 on both ranks: the sum of both ranks' 3 s², then twice the sum of both ranks' 6 s.
    assert run_worlds(2, rank) == [(54.0, 72.0)] * 2


def test_what_comes_back_is_left_as_it_was():
    def rank(own: int) -> list[bool]:
        unchanged = []
        for case in CASES.values():
            xs = [start(own, shape) for shape in case.shapes(own, 2)]
            ys = result_of(case, xs, own, 2)
            back = [weights(y.shape, own) for y in ys]
            torch.autograd.backward(ys, back)
            unchanged += [torch.equal(grad, weights(grad.shape, own)) for grad in back]
        return unchanged

    assert all(all(unchanged) for unchanged in run_worlds(2, rank))


@pytest.mark.parametrize("form", [hvd.allreduce, hvd.allgather, hvd.reducescatter, lambda x: hvd.broadcast(x, 0)])
def test_no_tensor_is_kept_for_the_backward_pass(form):
    def rank(number):
        x = torch.ones(2, requires_grad=True)
        given = 2 * x
        known = weakref.ref(given)
        result = form(given)
        del given
        assert known() is None
        result.sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]

    run_worlds(1, rank)


def test_what_backward_asks_for_has_the_forwards_name(monkeypatch):
    asked = []

    def rank(number):
        controller = current_world().controller
        submit = controller.submit

        def noting(group, operation):
            asked.append((operation.kind.name, operation.name))
            return submit(group, operation)

        monkeypatch.setattr(controller, "submit", noting)
        x = torch.ones(1, requires_grad=True)
        hvd.allgather(x, "b").sum().backward()
        hvd.broadcast(x, 0, "c").sum().backward()
        hvd.allreduce(x).sum().backward()
        hvd.allreduce(x, op=hvd.Max, name="d").sum().backward()

    run_worlds(1, rank)
    assert asked == [
        ("allgather", "b"),
        ("reducescatter", "b.gradient"),
        ("broadcast", "c"),
        ("allreduce", "c.gradient"),
        ("allreduce", None),
        ("allreduce", None),
        ("allreduce", "d"),
        ("allreduce", "d.gradient"),
    ]


def test_where_no_gradient_is_wanted_none_is_computed():
    def rank(number):
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert not hvd.allreduce(x).requires_grad
        assert not hvd.allgather(torch.ones(2)).requires_grad
        assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad

    run_worlds(2, rank)


@pytest.mark.parametrize(
    "overwrite",
    [lambda y: hvd.allreduce_(y, op=hvd.Sum), lambda y: hvd.broadcast_(y, 0)],
    ids=["allreduce_", "broadcast_"],
)
def test_autograd_notices_that_a_tensor_it_needs_has_been_overwritten(overwrite):
    def rank(number):
        y = torch.ones(2, requires_grad=True).exp()
        overwrite(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run_worlds(1, rank)


def test_results_may_be_changed_in_place_before_the_backward_pass():
    def rank(own: int) -> list[float]:
        seen = []
        for case in CASES.values():
            xs = [start(own, shape) for shape in case.shapes(own, 2)]
            ys = result_of(case, xs, own, 2)
            unscaled = [weights(y.shape, own) for y in ys]
            torch.autograd.backward(ys, [2 * grad for grad in unscaled])
            wanted = [x.grad.clone() for x in xs]
            zs = [start(own, shape) for shape in case.shapes(own, 2)]
            doubled = [y.mul_(2) for y in result_of(case, zs, own, 2)]
            torch.autograd.backward(doubled, unscaled)
            seen += [(z.grad - x).abs().sum().item() for z, x in zip(zs, wanted, strict=True)]
        return seen

    assert not any(any(differences) for differences in run_worlds(2, rank))
