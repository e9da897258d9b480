"""What all engines have in common: reduce-scatter, and ending by revocation or quiescence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import ENGINES, attempt_ranks, attempt_threads, generation_of, run_ranks

from hvdlite.comm import hierarchy
from hvdlite.comm.engine import RevokedError, SingleRankFactory
from hvdlite.comm.group import Group
from hvdlite.comm.hierarchy import HierarchicalEngineFactory, host_groups_of
from hvdlite.comm.reduce_op import Max, Min, Product, ReduceOp, Sum
from hvdlite.errors import CommunicationError, PeerLostError
from hvdlite.signing import Signer

KINDS = [*ENGINES, "two levels"]
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
COMBINED: dict[ReduceOp, Callable[[torch.Tensor], torch.Tensor]] = {
    Sum: lambda stacked: stacked.sum(0),
    Product: lambda stacked: stacked.prod(0),
    Min: lambda stacked: stacked.amin(0),
    Max: lambda stacked: stacked.amax(0),
}


@pytest.fixture(autouse=True)
def _small_tensors_take_two_levels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 0)


def run_kind(kind: str, size: int, function: Callable[[Group], Any], attempt: bool = False) -> list[Any]:
    """Does what `run_ranks` does, also over two levels: hosts of two ranks each."""

    def rank(group: Group) -> Any:
        if kind == "two levels":
            places = host_groups_of(group.rank, "aabbcc"[:size])
            assert places is not None
            levels = HierarchicalEngineFactory(group._engine_factory, None, places, group.rank, "test", {"cpu"})
            group = Group(levels, group.rank, group.size, group.hosts, signer=Signer(b"test"), label="levels")
        try:
            return function(group)
        finally:
            group.close()

    engine = "gloo" if kind == "two levels" else kind
    return (attempt_ranks if attempt else run_ranks)(size, rank, engine=engine)


def sizes_of(kind: str) -> Sequence[int]:
    return (4,) if kind == "two levels" else (1, 2, 3, 4)


@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind in KINDS for size in sizes_of(kind)])
def test_a_reduce_scatter_is_what_one_process_computes_whatever_the_parts_the_op_and_the_dtype(
    kind: str, size: int
) -> None:
    counts_of = [[5] * size, [3 * rank for rank in range(size)], [0] * (size - 1) + [7], [20_011] * size]

    def tensor_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # Small integers, whose sums and products are exact in every dtype.
        return ((torch.arange(numel) + rank) % 3 + 1).to(dtype)

    def rank(group: Group) -> None:
        begun = []
        for counts in counts_of:
            for dtype in DTYPES if sum(counts) < 1000 else DTYPES[:1]:
                for op, combine in COMBINED.items():
                    own = tensor_of(group.rank, sum(counts), dtype)
                    output = torch.full((counts[group.rank],), 9, dtype=dtype)
                    work = group.reduce_scatter(output, own.clone(), counts, "a reduce-scatter", op)
                    stacked = torch.stack([tensor_of(other, sum(counts), dtype) for other in range(size)])
                    expected = combine(stacked).to(dtype).split(counts)[group.rank]
                    begun.append((work, output, expected))
        for work, output, expected in begun:
            work.wait()
            assert torch.equal(output, expected)

    run_kind(kind, size, rank)


@pytest.mark.parametrize(("kind", "size"), [(kind, size) for kind in KINDS for size in sizes_of(kind)])
def test_an_all_reduce_is_what_one_process_computes_whatever_the_size_the_op_and_the_dtype(
    kind: str, size: int
) -> None:
    def tensor_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return ((torch.arange(numel) + rank) % 3 + 1).to(dtype)

    def rank(group: Group) -> None:
        begun = []
        # Two ranks exchange small tensors over gloo, and add them up themselves.
        for numel in (4, 13, 100_003):
            for dtype in DTYPES if numel < 1000 else DTYPES[:1]:
                for op, combine in COMBINED.items():
                    tensor = tensor_of(group.rank, numel, dtype)
                    stacked = torch.stack([tensor_of(other, numel, dtype) for other in range(size)])
                    begun.append((group.all_reduce(tensor, "an all-reduce", op), tensor, combine(stacked).to(dtype)))
        for work, tensor, expected in begun:
            work.wait()
            assert torch.equal(tensor, expected)

    run_kind(kind, size, rank)


@pytest.mark.parametrize("numel", [10, 100_000])
def test_an_all_reduce_is_no_change_that_autograd_counts_and_takes_tensors_of_inference_mode(numel: int) -> None:
    def rank(group: Group) -> None:
        parameter = torch.ones(numel, requires_grad=True)
        before = parameter._version
        group.all_reduce(parameter, "an all-reduce").wait()
        assert parameter.tolist() == [2.0] * numel
        assert parameter._version == before
        # On one rank alone: both must take the same way all the same.
        with torch.inference_mode(group.rank == 0):
            other = torch.ones(numel)
        group.all_reduce(other, "an all-reduce").wait()
        assert other.tolist() == [2.0] * numel

    run_ranks(2, rank, engine="gloo")


@pytest.mark.parametrize("kind", list(ENGINES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_added_up_in_rank_order_and_rounded_once(kind: str, dtype: torch.dtype) -> None:
    counts = [1000, 0, 2345]

    def tensor_of(rank: int) -> torch.Tensor:
        return torch.randn(sum(counts), generator=torch.Generator().manual_seed(rank)).to(dtype)

    def rank(group: Group) -> None:
        output = torch.empty(counts[group.rank], dtype=dtype)
        group.reduce_scatter(output, tensor_of(group.rank), counts, "a reduce-scatter").wait()
        total = tensor_of(0).float()
        for other in (1, 2):
            total = total + tensor_of(other).float()
        assert torch.equal(output, total.to(dtype).split(counts)[group.rank])

    run_kind(kind, 3, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_when_a_reduce_scatter_is_done_is_told_without_anybody_who_waits(kind: str) -> None:
    def rank(group: Group) -> None:
        is_done, output = threading.Event(), torch.empty(2)
        work = group.reduce_scatter(output, torch.ones(8), [2] * 4, "a reduce-scatter")
        work.when_done(is_done.set)
        assert is_done.wait(30)
        assert output.tolist() == [4.0, 4.0]
        work.wait()
        assert output.tolist() == [4.0, 4.0]

    run_kind(kind, 4, rank)


def begin(group: Group, numel: int = 8) -> Any:
    return group.all_reduce(torch.ones(numel), "an all-reduce")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [8, 300_000])
def test_a_revoked_group_ends_every_wait_with_the_first_reason_given(kind: str, numel: int) -> None:
    size = sizes_of(kind)[-1]
    is_over = threading.Event()

    def rank(group: Group) -> list[str]:
        if group.rank > 0:
            # This rank never comes.
            assert is_over.wait(60)
            return []
        works = [begin(group, numel) for _ in range(2)]
        said: list[str] = []

        def wait(number: int) -> None:
            with pytest.raises(PeerLostError) as caught:
                works[number % 2].wait()
            said.append(str(caught.value))

        waiting = threading.Thread(target=lambda: attempt_threads(3, wait))
        waiting.start()
        try:
            while len(generation_of(group).watch.blocked()) < 3:
                time.sleep(0.001)
            for reason in ("rank 7 has crashed", "something else"):
                group.revoke(reason)
            waiting.join(60)
            # Operations in progress have ended, and new ones are refused.
            wait(0)
            with pytest.raises(PeerLostError) as caught:
                begin(group).wait()
            said.append(str(caught.value))
        finally:
            is_over.set()
        return said

    said, *_ = run_kind(kind, size, rank)
    assert said == ["an all-reduce failed on rank 0 (node0): rank 7 has crashed"] * 5


def test_the_other_ranks_of_shared_memory_end_with_the_same_reason() -> None:
    all_wait = threading.Barrier(3)

    def rank(group: Group) -> None:
        if group.rank < 2:
            work = begin(group)
            all_wait.wait(60)
            work.wait()
        else:
            all_wait.wait(60)
            group.revoke("the host list has changed: " + "ä" * 1000)
            begin(group).wait()

    for outcome in attempt_ranks(3, rank, engine="shared memory"):
        assert isinstance(outcome, PeerLostError)
        assert "the host list has changed: ää" in str(outcome)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quiesced_group_ends_what_is_under_way_and_begins_nothing_more(kind: str) -> None:
    size = sizes_of(kind)[-1]

    def rank(group: Group) -> bool:
        tensors = [torch.ones(numel) for numel in (8, 300_000)]
        works = [group.all_reduce(tensor, "an all-reduce") for tensor in tensors]
        group.quiesce("a new world comes")
        # No rank has waited for them.
        assert all(bool(tensor.eq(size).all()) for tensor in tensors)
        with pytest.raises(RevokedError, match=r"an all-reduce failed on .*: a new world comes"):
            begin(group)
        for work in works:
            work.wait()
        group.revoke("a later reason")
        with pytest.raises(RevokedError, match="a new world comes"):
            begin(group)
        return True

    assert run_kind(kind, size, rank) == [True] * size


def test_a_rank_that_is_alone_can_be_quiesced_and_revoked_too() -> None:
    for end in (Group.revoke, Group.quiesce):
        group = Group(SingleRankFactory(), 0, 1, ["here"], signer=Signer(b"test"))
        begin(group).wait()
        end(group, "a new world comes")
        with pytest.raises(RevokedError, match="a new world comes"):
            begin(group)


def test_a_wait_for_gloo_is_over_as_soon_as_the_operation_is_though_it_looks_around_meanwhile() -> None:
    may_begin = threading.Event()

    def rank(group: Group) -> None:
        if group.rank == 1:
            assert may_begin.wait(60)
            begin(group).wait()
            return
        looks: list[None] = []
        state = group.engine._state  # type: ignore[attr-defined]  # a TorchEngine's
        look = state.require_not_revoked
        state.require_not_revoked = lambda: (looks.append(None), look(), len(looks) == 3 and may_begin.set())
        tensor = torch.ones(8)
        group.all_reduce(tensor, "an all-reduce").wait()
        assert len(looks) >= 3
        assert tensor.eq(2).all()
        assert not group.engine._pending  # type: ignore[attr-defined]

    run_kind("gloo", 2, rank)


def test_of_works_that_nobody_waits_for_only_those_under_way_are_kept() -> None:
    def rank(group: Group) -> int:
        for _ in range(200):
            work = begin(group)
            while not work.is_completed():
                time.sleep(0.0001)
        return len(group.engine._pending)  # type: ignore[attr-defined]  # a TorchEngine's

    assert max(run_kind("gloo", 2, rank)) <= 65


def test_a_closed_group_names_what_was_called_and_how_to_go_on() -> None:
    def rank(group: Group) -> None:
        part = group.duplicate()
        group.close()
        for closed in (group, part):
            assert closed.is_closed
            words = (
                rf"^the sum failed on rank {group.rank} \(node{group.rank}\): hvd.shutdown\(\), .* was called before: "
            )
            with pytest.raises(CommunicationError, match=words):
                closed.all_reduce(torch.ones(1), "the sum")
            with pytest.raises(CommunicationError, match=words):
                closed.require_ended("the sum")
            with pytest.raises(CommunicationError, match=r"call hvd.init\(\) again"):
                _ = closed.engine
            closed.revoke("no reason")
            closed.quiesce("no reason")
            assert closed.zeros(2, torch.float32, torch.device("cpu")).tolist() == [0.0, 0.0]
            closed.close()

    run_ranks(2, rank)
