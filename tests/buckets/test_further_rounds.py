"""Parameters that are unfrozen within a step, or given a gradient by hand, are averaged like any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import training
from fake_hosts import on
from ranks import counting, run_ranks, set_of
from torch import Tensor, nn

import hvdlite as hvd
from hvdlite.comm.group import Group

STEPS = 5

wrap = partial(training.wrap, momentum=0.5)


class Program:
    """Some parameters, of which a program trains different ones in the passes of a step; values are powers of two."""

    def __init__(self, rank: int, count: int = 4) -> None:
        self.rank = rank
        self.params = [nn.Parameter(torch.zeros(3)) for _ in range(count)]

    def freeze(self, *numbers: int) -> None:
        for number, param in enumerate(self.params):
            param.requires_grad_(number not in numbers)

    def backward(self, factor: float = 1.0) -> None:
        """A pass through all parameters, with other gradients on each rank."""
        if any(param.requires_grad for param in self.params):
            terms = [param.sum() * 2.0**number for number, param in enumerate(self.params)]
            (torch.stack(terms).sum() * (self.rank + 1) * factor).backward()


def gan(program: Program, step: int) -> None:
    """D (the last two parameters) is frozen in G's pass, and then has a pass of its own."""
    program.freeze(2, 3)
    program.backward()
    program.freeze(0, 1)
    program.backward(4.0)
    program.freeze()


def thawed_before_others(program: Program, step: int) -> None:
    """The gradient of a parameter that was frozen at first comes before others of its bucket."""
    program.freeze(0, 1, 2)
    program.backward()
    program.freeze(0, 3)
    program.backward()
    program.freeze(1, 2, 3)
    program.backward()


def sometimes_late(program: Program, step: int) -> None:
    """One parameter is frozen for two steps, and thawed within the next."""
    program.freeze(1)
    program.backward()
    if step >= 2:
        program.freeze(0, 2, 3)
        program.backward()
    program.freeze(1)


def late_on_one_rank(program: Program, step: int) -> None:
    """Only rank 1 thaws it within the step."""
    program.freeze(1)
    program.backward()
    if step >= 2 and program.rank == 1:
        program.freeze(0, 2, 3)
        program.backward()
    program.freeze(1)


def in_time_on_one_rank(program: Program, step: int) -> None:
    """Rank 0 thaws it before the step in which all others do so within it."""
    program.freeze(*() if step >= 2 and program.rank == 0 else (1,))
    program.backward()
    if step >= 2 and program.rank != 0:
        program.freeze(0, 2, 3)
        program.backward()
    program.freeze(1)


def by_hand(program: Program, step: int) -> None:
    """A frozen parameter gets a gradient by hand, in all steps but one."""
    program.freeze(1)
    program.backward()
    if step != 1:
        program.params[1].grad = torch.full((3,), 4.0 * (program.rank + 1))


PROGRAMS = (gan, thawed_before_others, sometimes_late, late_on_one_rank, in_time_on_one_rank, by_hand)


def frozen_at_first(program: Program) -> None:
    program.freeze(1, 2, 3)


def together(size: int, take: Callable[[Program, int], None], *, set_to_none: bool, frozen: bool) -> list[Any]:
    """What one process gets on the batches of all ranks: the gradients and values of each step."""
    programs = [Program(rank) for rank in range(size)]
    params = [nn.Parameter(torch.zeros(3)) for _ in programs[0].params]
    optimizer = torch.optim.SGD(params, lr=1.0, momentum=0.5)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        for program in programs:
            for param in program.params:
                param.grad = None
            take(program, step)
            for total, param in zip(params, program.params, strict=True):
                if param.grad is not None:
                    part = param.grad / size
                    total.grad = part if total.grad is None else total.grad + part
        optimizer.step()
        found.append([(None if p.grad is None else p.grad.clone(), p.detach().clone()) for p in params])
    return found


def require_equal(found: list[Any], expected: list[Any], tolerance: float = 1e-6) -> None:
    for step, (own, right) in enumerate(zip(found, expected, strict=True)):
        for number, ((grad, value), (right_grad, right_value)) in enumerate(zip(own, right, strict=True)):
            what = f"parameter {number} in step {step}"
            assert (grad is None) == (right_grad is None), what
            if grad is not None:
                torch.testing.assert_close(grad, right_grad, rtol=tolerance, atol=0, msg=what)
            torch.testing.assert_close(value, right_value, rtol=tolerance, atol=0, msg=what)


def trained(
    group: Group, take: Callable[[Program, int], None], *, set_to_none: bool, frozen: bool, **options: Any
) -> list[Any]:
    program = Program(group.rank)
    if frozen:
        frozen_at_first(program)
    optimizer = wrap(group, program.params, **options)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        take(program, step)
        with torch.no_grad():
            optimizer.synchronize()
        grads = [None if param.grad is None else param.grad.clone() for param in program.params]
        with optimizer.skip_synchronize():
            optimizer.step()
        found.append([(grad, param.detach().clone()) for grad, param in zip(grads, program.params, strict=True)])
    return found


@pytest.mark.night(but=20)
@pytest.mark.slow(but=8)
@pytest.mark.parametrize("take", PROGRAMS)
@pytest.mark.parametrize("cap", [1e-6, 16], ids=["a bucket each", "one bucket"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen at first"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["", "zeros"])
def test_gradients_that_come_after_their_bucket_was_sent_are_averaged(take, cap, frozen, set_to_none):
    expected = together(3, take, set_to_none=set_to_none, frozen=frozen)
    found = run_ranks(
        3, lambda group: trained(group, take, set_to_none=set_to_none, frozen=frozen, bucket_cap_mb=cap),
        engine="shared memory",
    )  # fmt: skip
    for each in found:
        require_equal(each, expected)


class Summed(hvd.Exchange):
    """An exchange of the user's own, which the counts do not travel with."""

    def begin(self, gradients, links):
        work = links.all.all_reduce(gradients.flat, f"the sum of the {gradients.what}")
        return hvd.ExchangeWork(gradients, [work])


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.fp16},
        {"exchange": Summed},
        {"groups": 2},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=["fp16", "exchange", "groups", "predivide"],
)
@pytest.mark.parametrize("take", PROGRAMS)
def test_so_they_are_however_gradients_are_sent(take, options):
    expected = together(2, take, set_to_none=True, frozen=False)
    for each in run_ranks(2, lambda group: trained(group, take, set_to_none=True, frozen=False, **options)):
        require_equal(each, expected)


@pytest.mark.night(but=18)
@pytest.mark.slow(but=8)
@pytest.mark.parametrize(
    ("compression", "cap"),
    [(hvd.Compression.int8, 1e-6), (hvd.Compression.topk(1.0), 16), (hvd.Compression.powersgd(2), 16)],
    ids=["int8", "topk", "powersgd"],
)
@pytest.mark.parametrize("place", ["2 hosts", "3 hosts"])
@pytest.mark.parametrize("take", PROGRAMS)
def test_between_hosts_a_further_round_takes_nothing_of_what_was_sent_before(take, place, compression, cap):
    """All forms send these gradients as they are: those of a parameter are equal, and int8 scales each by itself."""
    options = {"compression": compression, "bucket_cap_mb": cap}
    expected = together(int(place[0]), take, set_to_none=True, frozen=False)
    found = on(place, lambda group: trained(group, take, set_to_none=True, frozen=False, **options))
    for each in found:
        assert str(each) == str(found[0]), "ranks differ"
        require_equal(each, expected, tolerance=1e-3)


def test_only_a_step_in_which_something_can_be_late_has_a_collective_more():
    def rank(group: Group) -> list[int]:
        program = Program(group.rank)
        optimizer = wrap(group, program.params)
        optimizer._reducer.connect()
        calls = []
        for step in range(7):
            optimizer.zero_grad()
            program.freeze(*(1,) if step in (2, 3, 4) else ())
            group.engine.calls.clear()
            program.backward()
            before = len(group.engine.calls)
            if step == 4:
                program.freeze(0, 2, 3)
                program.backward()
            optimizer.step()
            calls.append((before, len(group.engine.calls)))
        return calls

    # In step 2 a parameter is newly frozen: its bucket is sent in the step. Then all know that it is, and send the
    # bucket during backward again, and ask whether it was unfrozen. In step 4 it is: the bucket has a further round.
    expected = [(1, 2), (1, 1), (0, 1), (1, 2), (1, 3), (1, 1), (1, 1)]
    assert run_ranks(2, rank, counting) == [expected] * 2


@pytest.mark.parametrize("passes", [2, 3])
def test_passes_of_a_late_gradient_are_summed_too(passes):
    def rank(group: Group) -> list[float]:
        program = Program(group.rank, 2)
        optimizer = wrap(group, program.params, lr=0.0, backward_passes_per_step=passes)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            program.freeze(1)
            for _ in range(passes):
                program.backward()
            program.freeze(0)
            # The last step has fewer of them on one rank.
            for _ in range(passes - (step == 3 and group.rank == 0)):
                program.backward()
            optimizer.step()
            found.append(program.params[1].grad[0].item())
        return found

    whole, less = 2 * 1.5 * passes, 2 * (1 * (passes - 1) + 2 * passes) / 2
    assert run_ranks(2, rank) == [[whole] * 3 + [less]] * 2


def embedding(rank: int, table: nn.Embedding) -> Tensor:
    return table(torch.tensor([rank, 3])).sum()


@pytest.mark.parametrize("as_dense", [False, True])
def test_a_late_gradient_may_be_sparse(as_dense):
    def rank(group: Group) -> list[Any]:
        table, other = nn.Embedding.from_pretrained(torch.zeros(4, 2), sparse=True), nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([table.weight, other], lr=1.0), sparse_as_dense=as_dense, process_set=set_of(group)
        )
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            table.weight.requires_grad_(False)
            (embedding(group.rank, table) + other.sum() * (group.rank + 1)).backward()
            table.weight.requires_grad_(True)
            embedding(group.rank, table).backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
            found.append((table.weight.grad.to_dense().tolist(), table.weight.tolist(), other.tolist()))
        return found

    rows = [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]
    expected = [(rows, [[-step * value for value in row] for row in rows], [-1.5 * step] * 3) for step in range(1, 4)]
    assert run_ranks(2, rank) == [expected] * 2


def test_a_gradient_that_is_late_and_sparse_on_one_rank_and_dense_on_another_is_an_error():
    def rank(group: Group) -> None:
        table = nn.Embedding.from_pretrained(torch.zeros(4, 2), sparse=group.rank == 1)
        other = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([table.weight, other], lr=1.0), process_set=set_of(group)
        )  # fmt: skip
        table.weight.requires_grad_(group.rank == 0)
        (embedding(group.rank, table) + other.sum()).backward()
        if group.rank == 0:
            optimizer.step()
            return
        table.weight.requires_grad_(True)
        embedding(group.rank, table).backward()
        with pytest.raises(hvd.MismatchError, match="sparse gradient on some ranks and a dense one on others"):
            optimizer.step()

    run_ranks(2, rank)


@pytest.mark.parametrize("take", PROGRAMS)
def test_a_step_by_bucket_takes_each_parameter_once_with_its_whole_average(take):
    expected = together(2, take, set_to_none=True, frozen=False)

    def rank(group: Group) -> list[Any]:
        program = Program(group.rank)
        optimizer = wrap(group, program.params, step_on_arrival=True, bucket_cap_mb=1e-6)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            take(program, step)
            optimizer.step()
            assert all(param.grad is None for param in program.params)
            found.append([param.detach().clone() for param in program.params])
        return found

    for each in run_ranks(2, rank):
        for step, (own, right) in enumerate(zip(each, expected, strict=True)):
            for value, (_, right_value) in zip(own, right, strict=True):
                torch.testing.assert_close(value, right_value, msg=f"step {step}")


def test_late_gradients_are_clipped_and_weighted_with_the_others():
    def rank(group: Group) -> list[Any]:
        program = Program(group.rank, 2)
        optimizer = wrap(group, program.params, max_norm=1e-3)
        plain = wrap(group, [nn.Parameter(torch.zeros(3)) for _ in range(2)], lr=0.0)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            program.freeze(1)
            program.backward()
            program.freeze(0)
            program.backward()
            optimizer.step()
            norms.append(optimizer.grad_norm.item())
        first, second = plain.param_groups[0]["params"]
        n = 3 * group.rank + 1
        for _ in range(3):
            plain.zero_grad()
            second.requires_grad_(False)
            plain.weighted(first.sum() * (group.rank + 1), n).backward()
            second.requires_grad_(True)
            plain.weighted(second.sum() * (group.rank + 1), 0 if group.rank == 0 else n).backward()
            plain.step()
        return [*norms, first.grad[0].item(), second.grad[0].item()]

    norm = (3 * 1.5**2 + 3 * 3.0**2) ** 0.5
    for *norms, first, second in run_ranks(2, rank):
        assert norms == pytest.approx([norm] * 3)
        # Rank 1 has weighted two losses with n = 4, and rank 0 one with n = 1.
        assert (first, second) == pytest.approx(((1 * 1 + 4 * 2) / 9, 4 * 2 / 9))


def test_a_rank_that_has_joined_takes_part_in_further_rounds():
    def rank(group: Group) -> list[float]:
        program = Program(group.rank, 2)
        optimizer = wrap(group, program.params, lr=0.0)
        found = []
        for step in range(4):
            if step >= 1 and group.rank == 0:
                optimizer._reducer.sit_out(average_of_active=True)
                continue
            optimizer.zero_grad()
            program.freeze(1)
            program.backward()
            if step in (0, 2):
                program.freeze(0)
                program.backward()
            optimizer.step()
            found.append(None if program.params[1].grad is None else program.params[1].grad[0].item())
        return found

    assert run_ranks(2, rank) == [[3.0], [3.0, None, 4.0, None]]
