"""The local and cross rank of each rank follow from all ranks' placements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdlite.rendezvous.placement import Placement, placements_to_topology


def test_cross_ranks_count_the_hosts_that_have_the_local_rank():
    nodes = ["a", "a", "a", "b", "c", "c"]
    placements = [Placement(rank, 6, node, node) for rank, node in enumerate(nodes)]
    places = [placements_to_topology(rank, placements) for rank in range(6)]
    assert [p.local_rank for p in places] == [0, 1, 2, 0, 0, 1]
    assert [p.local_size for p in places] == [3, 3, 3, 1, 2, 2]
    assert [p.cross_rank for p in places] == [0, 0, 0, 1, 2, 1]
    assert [p.cross_size for p in places] == [3, 2, 1, 3, 3, 2]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_local_and_cross_ranks_number_every_process_once(nodes):
    placements = [Placement(rank, len(nodes), node, node) for rank, node in enumerate(nodes)]
    places = [placements_to_topology(rank, placements) for rank in range(len(nodes))]
    assert len({(node, p.local_rank) for node, p in zip(nodes, places, strict=True)}) == len(nodes)
    assert len({(p.cross_rank, p.local_rank) for p in places}) == len(nodes)
    assert {p.is_homogeneous for p in places} == {len(set(map(nodes.count, nodes))) == 1}
    assert all(p.local_rank < p.local_size and p.cross_rank < p.cross_size for p in places)
