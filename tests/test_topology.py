"""A process finds its place from what its launcher tells it, and says what is wrong with that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.topology import Seat, read_seat, seats_to_topology

HVDLITE = {
    "HVDLITE_RANK": "1", "HVDLITE_SIZE": "4", "HVDLITE_LOCAL_RANK": "1", "HVDLITE_LOCAL_SIZE": "2",
    "HVDLITE_CROSS_RANK": "0", "HVDLITE_CROSS_SIZE": "2", "HVDLITE_HOST": "node1", "HVDLITE_STORE": "unix:///s",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip


def test_no_launcher_is_no_seat():
    assert read_seat({}) is None


def test_hvdlite_run_tells_rank_host_and_store():
    assert read_seat(HVDLITE) == Seat(1, 4, "node1", "node1", 1, "unix:///s")


def test_torchrun_tells_rank_and_node():
    seat = read_seat(TORCHRUN)
    assert (seat.rank, seat.size, seat.node, seat.local_rank, seat.store_url) == (3, 4, "1", 1, None)


def test_hvdlite_run_inside_another_launchers_job_wins():
    assert read_seat(TORCHRUN | HVDLITE).rank == 1


@pytest.mark.parametrize("name", ["HVDLITE_SIZE", "HVDLITE_LOCAL_RANK", "HVDLITE_STORE"])
def test_a_missing_variable_is_named(name):
    with pytest.raises(hvd.LaunchEnvironmentError, match=f"{name} is not set"):
        read_seat({key: value for key, value in HVDLITE.items() if key != name})


@pytest.mark.parametrize(("name", "value"), [("HVDLITE_RANK", "x"), ("HVDLITE_RANK", "4"), ("HVDLITE_SIZE", "-1")])
def test_a_wrong_variable_is_named_with_its_value(name, value):
    with pytest.raises(hvd.LaunchEnvironmentError, match=name):
        read_seat(HVDLITE | {name: value})


def test_torchruns_missing_address_is_named():
    with pytest.raises(hvd.LaunchEnvironmentError, match="MASTER_ADDR is not set"):
        read_seat({"RANK": "0", "WORLD_SIZE": "1"})


def test_cross_ranks_count_the_hosts_that_have_the_local_rank():
    nodes = ["a", "a", "a", "b", "c", "c"]
    seats = [Seat(rank, 6, node, node) for rank, node in enumerate(nodes)]
    places = [seats_to_topology(rank, seats) for rank in range(6)]
    assert [p.local_rank for p in places] == [0, 1, 2, 0, 0, 1]
    assert [p.local_size for p in places] == [3, 3, 3, 1, 2, 2]
    assert [p.cross_rank for p in places] == [0, 0, 0, 1, 2, 1]
    assert [p.cross_size for p in places] == [3, 2, 1, 3, 3, 2]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_local_and_cross_ranks_number_every_process_once(nodes):
    seats = [Seat(rank, len(nodes), node, node) for rank, node in enumerate(nodes)]
    places = [seats_to_topology(rank, seats) for rank in range(len(nodes))]
    assert len({(node, p.local_rank) for node, p in zip(nodes, places, strict=True)}) == len(nodes)
    assert len({(p.cross_rank, p.local_rank) for p in places}) == len(nodes)
    assert all(p.local_rank < p.local_size and p.cross_rank < p.cross_size for p in places)
