"""All-reduces within hosts and between them: the same as flat ones, with less over the network."""

from __future__ import annotations

import threading

import pytest
import torch
from ranks import CountingEngine, run_ranks

from hvdlite.channels import hierarchy
from hvdlite.channels.collective import Group
from hvdlite.channels.hierarchy import HierarchicalChannels, Places, places_of
from hvdlite.channels.reduce_op import Max, Min, Product, Sum


def test_places_are_found_whatever_the_order_of_ranks_on_hosts():
    assert places_of(0, "aabb") == Places((0, 1), (0, 2))
    assert places_of(3, "abab") == Places((1, 3), (2, 3))
    assert places_of(5, "aaabbb") == Places((3, 4, 5), (2, 5))
    assert places_of(2, "abcabc") == Places((2, 5), (0, 1, 2))


@pytest.mark.parametrize("nodes", ["a", "ab", "aaaa", "aab", "aaabb"])
def test_where_hosts_are_one_or_have_one_rank_or_not_as_many_there_are_no_levels(nodes):
    assert [places_of(rank, nodes) for rank in range(len(nodes))] == [None] * len(nodes)


def hierarchical(group: Group, nodes: str) -> HierarchicalChannels:
    places = places_of(group.rank, nodes)
    assert places is not None
    return HierarchicalChannels(group._channels, places, group.rank, "test", {"cpu"})


def small_integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whose sums and products are exact in every dtype, in whatever order."""
    return ((torch.arange(numel) + rank) % 3 + 1).to(dtype)


@pytest.mark.parametrize("nodes", ["aabb", pytest.param("aaabbb", marks=pytest.mark.slow),
                                   pytest.param("ababab", marks=pytest.mark.slow)])  # fmt: skip
def test_an_all_reduce_of_two_levels_is_a_flat_one(monkeypatch, nodes):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)

    def rank(group: Group) -> None:
        channels = hierarchical(group, nodes)
        engine = channels.open()
        levels = Group.__new__(Group)
        levels.__dict__.update(group.__dict__, engine=engine)
        every = range(group.size)
        begun = []
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8):
            for numel in (1, 15, 16, 64, 101):
                for op, reduce in ((Sum, sum), (Max, max), (Min, min), (Product, None)):
                    tensor = small_integers(group.rank, numel, dtype)
                    stacked = torch.stack([small_integers(other, numel, dtype) for other in every])
                    if reduce is None:
                        expected = stacked.prod(0).to(dtype)
                    else:
                        expected = {Sum: stacked.sum(0).to(dtype), Max: stacked.amax(0), Min: stacked.amin(0)}[op]
                    begun.append((tensor, expected, levels.all_reduce(tensor, f"{dtype} {numel} {op}", op)))
        ends = [threading.Event() for _ in begun]
        for (_, _, work), end in zip(begun, ends, strict=True):
            work.when_done(end.set)
        for (tensor, expected, work), end in zip(begun, ends, strict=True):
            work.wait()
            assert torch.equal(tensor, expected)
            assert end.wait(10)
            assert work.is_completed()
        channels.close(engine)

    run_ranks(len(nodes), rank)


def test_any_shape_goes_and_other_collectives_are_the_flat_engines(monkeypatch):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)

    def rank(group: Group) -> list[tuple[str, int]]:
        flat = CountingEngine(group._channels.open(), [])
        engine = hierarchical(group, "aabb").around(flat)
        levels = Group.__new__(Group)
        levels.__dict__.update(group.__dict__, engine=engine)
        square = torch.full((3, 3), 1.0 + group.rank)
        levels.all_reduce(square, "a square").wait()
        assert square.eq(10).all()
        small = torch.ones(3)
        levels.all_reduce(small, "a small one").wait()
        assert small.eq(4).all()
        root = torch.full((5,), float(group.rank))
        levels.broadcast(root, 2, "a broadcast").wait()
        assert root.eq(2).all()
        assert levels.all_gather_object(group.rank, "objects") == [0, 1, 2, 3]
        return flat.calls

    # Of the square the one element that two ranks cannot share; of what is small, all.
    for calls in run_ranks(4, rank):
        assert calls[:3] == [("allreduce", 1), ("allreduce", 3), ("broadcast", 20)]
        assert {name for name, _ in calls[3:]} == {"allgather"}


def test_a_host_sends_over_the_network_what_one_rank_would(monkeypatch):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)

    def rank(group: Group) -> int:
        engine = hierarchical(group, "aabb").open()
        across = CountingEngine(engine._across, [])
        engine._across = across
        engine.allreduce([torch.ones(64)], torch.distributed.AllreduceOptions()).wait()
        return sum(numel for _, numel in across.calls)

    assert run_ranks(4, rank) == [32] * 4


def test_what_fails_on_the_way_is_raised_where_it_is_waited_for(monkeypatch):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)

    class Broken:
        def allreduce(self, *_: object) -> None:
            raise RuntimeError("no way across")

    def rank(group: Group) -> str:
        engine = hierarchical(group, "aabb").open()
        engine._across = Broken()
        work = engine.allreduce([torch.ones(64)], torch.distributed.AllreduceOptions())
        with pytest.raises(RuntimeError, match="no way across") as caught:
            work.wait()
        assert work.is_completed()
        return str(caught.value)

    run_ranks(4, rank)
