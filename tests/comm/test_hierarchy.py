"""All-reduces in two levels: the results of flat ones, with less traffic over the network."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch
from ranks import CountingEngine, run_ranks

from hvdlite.comm import hierarchy
from hvdlite.comm.engine import Engine, SingleRankEngine
from hvdlite.comm.group import Group
from hvdlite.comm.hierarchy import HierarchicalEngineFactory, HostGroups, choose_levels, fastest, host_groups_of
from hvdlite.comm.reduce_op import Max, Min, Product, Sum
from hvdlite.errors import PeerLostError


def test_places_are_found_whatever_the_order_of_ranks_on_hosts():
    assert host_groups_of(0, "aabb") == HostGroups((0, 1), (0, 2), ((0, 1), (2, 3)))
    assert host_groups_of(3, "abab") == HostGroups((1, 3), (2, 3), ((0, 2), (1, 3)))
    assert host_groups_of(5, "aaabbb") == HostGroups((3, 4, 5), (2, 5), ((0, 1, 2), (3, 4, 5)))
    assert host_groups_of(2, "abcabc") == HostGroups((2, 5), (0, 1, 2), ((0, 3), (1, 4), (2, 5)))


@pytest.mark.parametrize("nodes", ["a", "ab", "aaaa", "aab", "aaabb"])
def test_where_hosts_are_one_or_have_one_rank_or_not_as_many_there_are_no_levels(nodes):
    assert [host_groups_of(rank, nodes) for rank in range(len(nodes))] == [None] * len(nodes)


def hierarchical(group: Group, nodes: str) -> HierarchicalEngineFactory:
    places = host_groups_of(group.rank, nodes)
    assert places is not None
    return HierarchicalEngineFactory(group._engine_factory, None, places, group.rank, "test", {"cpu"})


def over(engine: Engine, group: Group) -> Group:
    """Returns a group of the same ranks over another engine."""
    levels = group.duplicate()
    levels.change_engines(group._engine_factory, engine)
    return levels


def small_integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes integers whose sums and products are exact in every dtype, in any order."""
    return ((torch.arange(numel) + rank) % 3 + 1).to(dtype)


@pytest.mark.parametrize("nodes", ["aabb", pytest.param("aaabbb", marks=pytest.mark.slow),
                                   pytest.param("ababab", marks=pytest.mark.slow)])  # fmt: skip
def test_an_all_reduce_of_two_levels_is_a_flat_one(monkeypatch, nodes):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)

    def rank(group: Group) -> None:
        engine_factory = hierarchical(group, nodes)
        engine = engine_factory.open()
        levels = over(engine, group)
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
            assert end.wait(60)
            assert work.is_completed()
        engine.close()

    run_ranks(len(nodes), rank)


def test_any_shape_goes_and_other_collectives_are_the_flat_engines(monkeypatch):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)

    def rank(group: Group) -> list[tuple[str, int]]:
        flat = CountingEngine(group._engine_factory.open(), [])
        engine = hierarchical(group, "aabb").around(flat)
        levels = over(engine, group)
        square = torch.full((3, 3), 1.0 + group.rank)
        levels.all_reduce(square, "a square").wait()
        assert square.eq(10).all()
        small = torch.ones(3)
        levels.all_reduce(small, "a small one").wait()
        assert small.eq(4).all()
        root = torch.full((5,), float(group.rank))
        levels.broadcast(root, 2, "a broadcast").wait()
        assert root.eq(2).all()
        assert levels.all_gather_json(group.rank, "objects") == [0, 1, 2, 3]
        return flat.calls

    # Of the square, the one element that two ranks cannot share; of small tensors, all elements.
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


def test_shards_use_the_memory_of_those_before_them_whatever_their_sizes_and_dtypes(monkeypatch):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)

    class Keeping(CountingEngine):
        """Keeps the shards that it is given, so that no two have the same memory by chance."""

        def allreduce(self, tensors: list[torch.Tensor], opts: object) -> object:
            kept.append(tensors[0])
            return super().allreduce(tensors, opts)

    kept: list[torch.Tensor] = []

    def rank(group: Group) -> None:
        engine = hierarchical(group, "aabb").open()
        if group.rank == 0:
            engine._across = Keeping(engine._across, [])
        for dtype, numel in ((torch.float32, 64), (torch.float32, 32), (torch.float64, 32), (torch.uint8, 20)):
            tensors = [torch.full((numel,), group.rank + 1, dtype=dtype) for _ in range(2)]
            for _ in range(3):
                for tensor in tensors:
                    engine.allreduce([tensor.fill_(group.rank + 1)], torch.distributed.AllreduceOptions()).wait()
                    assert tensor.eq(10).all()

    run_ranks(4, rank)
    assert len(kept) == 24
    assert len({shard.data_ptr() for shard in kept}) == 1


def test_as_many_shards_are_kept_as_were_under_way_at_once_and_no_more_than_is_worth_it(monkeypatch):
    shards = hierarchy._Shards()
    monkeypatch.setattr(hierarchy, "_MOST_KEPT_BYTES", 1000)
    like = torch.empty(0, dtype=torch.uint8)
    under_way = [shards.take(numel, like) for numel in (100, 300, 200)]
    for shard in under_way:
        shards.give_back(shard)
    pointers = {shard.data_ptr() for shard in under_way}
    assert shards.take(150, like).data_ptr() == under_way[2].data_ptr()
    larger = shards.take(900, like)
    assert larger.data_ptr() not in pointers
    # The shard of 300 elements was dropped for it.
    assert [piece.numel() for piece in shards._free] == [100]
    shards.give_back(larger)
    shards.give_back(torch.empty(1, dtype=torch.uint8))
    assert [piece.numel() for piece in shards._free] == [100, 900]


def test_of_a_reduce_scatter_a_host_sends_what_its_ranks_get_elsewhere_once(monkeypatch):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)

    def rank(group: Group) -> int:
        engine = hierarchical(group, "aabb").open()
        across = CountingEngine(engine._across, [])
        engine._across = across
        counts = [10, 20, 30, 40]
        output = torch.empty(counts[group.rank])
        options = torch.distributed.ReduceScatterOptions()
        engine.reduce_scatter_base(output, torch.ones(100), counts, options).wait()
        assert output.eq(4).all()
        return sum(numel for _, numel in across.calls)

    # What the ranks with the same local rank on both hosts get: already summed within each host.
    assert run_ranks(4, rank) == [40, 60, 40, 60]


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


class Slow(SingleRankEngine):
    """An engine whose operations take time on a simulated clock."""

    def __init__(self, clock: Clock, seconds_of_large: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds_of_large = seconds_of_large

    def allreduce(self, tensors: list[torch.Tensor], opts: object, /) -> object:
        self._clock.now_s += self._seconds_of_large if tensors[0].numel() > 2**20 else 1.0
        return super().allreduce(tensors, opts)


class Clock:
    now_s = 0.0


def test_the_engine_is_chosen_that_rank_0_found_the_faster_and_the_log_has_the_times(monkeypatch, caplog):
    clocks = threading.local()
    monkeypatch.setattr(hierarchy.time, "perf_counter", lambda: clocks.own.now_s)

    def rank(group: Group) -> int:
        clocks.own = Clock()
        # The other ranks measure the opposite.
        seconds = (3.0, 2.0) if group.rank == 0 else (2.0, 3.0)
        return fastest([Slow(clocks.own, each) for each in seconds], group, torch.device("cpu"))

    with caplog.at_level("INFO", "hvdlite"):
        assert run_ranks(2, rank) == [1, 1]
    (line,) = [record.message for record in caplog.records]
    assert "[1, 16] MiB took [[1000.0, 1000.0], [3000.0, 2000.0]] ms" in line
    assert line.endswith("engine 2 is used")


def test_a_rank_that_is_lost_while_engines_are_measured_is_a_peer_that_was_lost():
    lost = Mock()
    lost.allreduce.side_effect = RuntimeError("NCCL error: remote process exited")

    def rank(group: Group) -> None:
        with pytest.raises(PeerLostError, match=r"hvd.init\(\) failed on rank"):
            fastest([lost, lost], group, torch.device("cpu"))

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("wanted", "faster", "levels"), [(True, 0, True), (False, 1, False), (None, 0, False), (None, 1, True)]
)
def test_levels_are_taken_as_is_wanted_or_as_is_measured(monkeypatch, wanted, faster, levels):
    monkeypatch.setattr(hierarchy, "fastest", lambda engines, group, device: faster)

    def rank(group: Group) -> bool:
        flat = group.engine
        choose_levels(group, group._engine_factory, None, "aabb", wanted, torch.device("cpu"))
        engine = group.engine
        assert engine is flat or engine.flat is flat
        tensor = torch.ones(2**15)
        group.duplicate().all_reduce(tensor, "afterwards").wait()
        assert tensor.eq(4).all()
        return engine is not flat

    assert run_ranks(4, rank) == [levels] * 4


@pytest.mark.parametrize(
    ("wanted", "nodes", "said"), [(True, "aa", "these hosts have 2"), (True, "aab", "2, 1"), (None, "aab", "")]
)
def test_where_there_are_no_levels_one_line_says_so_to_who_wanted_them(caplog, wanted, nodes, said):
    def rank(group: Group) -> None:
        flat = group.engine
        choose_levels(group, group._engine_factory, None, nodes, wanted, torch.device("cpu"))
        assert group.engine is flat

    run_ranks(len(nodes), rank)
    lines = [record.message for record in caplog.records]
    assert len(lines) == (1 if said else 0)
    assert all(line.endswith(said) for line in lines)


def test_a_closed_engine_leaves_no_thread_that_would_outlive_its_parts(monkeypatch):
    monkeypatch.setattr(hierarchy, "LEAST_BYTES", 16)
    monkeypatch.setattr(hierarchy, "_CLOSING_S", 60.0)

    def rank(group: Group) -> None:
        engine = hierarchical(group, "aabb").open()
        tensor = torch.ones(64)
        engine.allreduce([tensor], torch.distributed.AllreduceOptions()).wait()
        threads = engine._step_threads._threads
        assert len(threads) == 2
        engine.close()
        assert not any(thread.is_alive() for thread in threads)

    run_ranks(4, rank)


def test_a_group_of_two_levels_may_be_closed_again():
    """Like the group of an optimizer that outlives its world."""

    def rank(group: Group) -> None:
        choose_levels(group, group._engine_factory, None, "aabb", True, None)
        duplicate = group.duplicate()
        group.close()
        duplicate.close()
        with pytest.raises(RuntimeError, match=r"hvd\.shutdown"):
            duplicate.all_reduce(torch.ones(1), "too late")

    run_ranks(4, rank)
