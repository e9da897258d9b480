"""On which host each rank runs, and the variables that its environment has."""

import sys

import pytest
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.plan.hosts import Host, plan_slots
from hvdlite_launcher.plan.worker_environment import (
    OWN_VARIABLES,
    HostEnvironment,
    elastic_environment,
    job_dir,
    slot_environment,
    store_socket,
    variables_set,
)
from hypothesis import given
from hypothesis import strategies as st

HOSTS = st.lists(st.integers(1, 6), min_size=1, max_size=5).map(
    lambda slots: tuple(Host(f"node{i}", n) for i, n in enumerate(slots))
)


UNLESS_SET = {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "GLOO_ENABLE_STORE_V2_API", "GLOO_SOCKET_IFNAME"}


def test_hosts_of_different_sizes_are_filled_in_order():
    slots = plan_slots((Host("a", 2), Host("b", 1), Host("c", 3)))
    assert [(s.rank, s.host.name, s.local_rank, s.local_size, s.cross_rank, s.cross_size) for s in slots] == [
        (0, "a", 0, 2, 0, 3),
        (1, "a", 1, 2, 0, 2),
        (2, "b", 0, 1, 1, 3),
        (3, "c", 0, 3, 2, 3),
        (4, "c", 1, 3, 1, 2),
        (5, "c", 2, 3, 0, 1),
    ]


@given(HOSTS, st.data())
def test_any_plan_numbers_its_ranks_and_keeps_within_the_slots(hosts, data):
    size = data.draw(st.integers(1, sum(host.slots for host in hosts)))
    slots = plan_slots(hosts, size)
    assert [slot.rank for slot in slots] == list(range(size))
    for host in hosts:
        own = [slot for slot in slots if slot.host == host]
        assert [slot.local_rank for slot in own] == list(range(len(own)))
        assert {slot.local_size for slot in own} <= {len(own)}
        assert len(own) <= host.slots
    for slot in slots:
        across = [other for other in slots if other.local_rank == slot.local_rank]
        assert slot.cross_size == len(across)
        assert across[slot.cross_rank] is slot


def test_fewer_ranks_than_slots_leave_the_last_hosts_out():
    slots = plan_slots((Host("a", 2), Host("b", 2)), 2)
    assert {slot.host.name for slot in slots} == {"a"}
    assert {slot.cross_size for slot in slots} == {1}


def test_more_ranks_than_slots_is_a_usage_error_with_both_numbers():
    with pytest.raises(UsageError, match="-np 5 is more than the 4 slots"):
        plan_slots((Host("a", 2), Host("b", 2)), 5)


LOCALHOST = (Host("localhost", 2),)


def _environment(given, hosts=LOCALHOST, interface="lo", cores=8):
    size = sum(host.slots for host in hosts)
    slot = plan_slots(hosts)[1]
    own = slot_environment(slot, size, master_address="10.0.0.1", master_port=40000)
    host = HostEnvironment("/tmp/hvdlite-x", cores, interface, slot.local_size, is_alone=len(hosts) == 1)
    return {**given, **variables_set(given, own, host)}


def test_a_worker_is_told_its_place_and_where_to_meet():
    assert _environment({"KEPT": "a b", "HVDLITE_RANK": "of an outer job"}) == {
        "KEPT": "a b",
        "HVDLITE_RANK": "1",
        "HVDLITE_SIZE": "2",
        "HVDLITE_LOCAL_RANK": "1",
        "HVDLITE_LOCAL_SIZE": "2",
        "HVDLITE_CROSS_RANK": "0",
        "HVDLITE_CROSS_SIZE": "1",
        "HVDLITE_WORKER": "1",
        "HVDLITE_HOST": "localhost",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "40000",
        "HVDLITE_STORE": "unix:///tmp/hvdlite-x/store",
        "HVDLITE_JOB_DIR": "/tmp/hvdlite-x",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "GLOO_ENABLE_STORE_V2_API": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_what_the_user_set_is_kept():
    given = {
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "",
        "GLOO_ENABLE_STORE_V2_API": "0",
        "GLOO_SOCKET_IFNAME": "eth7",
    }
    assert given.items() <= _environment(given).items()


def test_more_workers_than_cores_get_one_thread_each():
    assert _environment({}, cores=1)["OMP_NUM_THREADS"] == "1"


def test_between_hosts_gloo_and_nccl_are_told_the_interface():
    told = _environment({}, (Host("a"), Host("b")), "ens7")
    assert (told["GLOO_SOCKET_IFNAME"], told["NCCL_SOCKET_IFNAME"]) == ("ens7", "=ens7")
    assert told["GROUP_RANK"] == "1"


def test_nobody_is_told_of_an_interface_that_is_not_known():
    assert "GLOO_SOCKET_IFNAME" not in _environment({}, LOCALHOST, None)


def test_a_worker_of_an_elastic_job_is_told_its_number_and_its_slot_and_neither_rank_nor_size():
    assert elastic_environment(7, "node1", 2) == {
        "HVDLITE_ELASTIC": "1",
        "HOROVOD_ELASTIC": "1",
        "HVDLITE_WORKER": "7",
        "HVDLITE_HOST": "node1",
        "HOROVOD_HOSTNAME": "node1",
        "HVDLITE_LOCAL_RANK": "2",
        "HOROVOD_LOCAL_RANK": "2",
        "LOCAL_RANK": "2",
    }


def test_the_variables_that_only_we_set_are_all_listed():
    everything = _environment({}).keys() | elastic_environment(0, "node1", 0, chaos="kill@vote:7").keys()
    assert everything - UNLESS_SET == OWN_VARIABLES


@pytest.mark.parametrize("tmp", ["/var/tmp", "/var/" + "t" * 60])
def test_the_jobs_directory_is_in_the_hosts_temporary_one(tmp):
    assert job_dir("<job>", tmp) == f"{tmp}/hvdlite-<job>"


@pytest.mark.parametrize("tmp", ["/var/" + "t" * 150, "/var/" + "ü" * 40])
def test_where_that_is_too_long_for_a_socket_it_is_in_tmp(tmp):
    assert job_dir("<job>", tmp) == "/tmp/hvdlite-<job>"


@pytest.mark.parametrize("length", range(1, 200))
def test_the_socket_in_it_has_a_name_that_every_system_takes(length):
    name = store_socket(job_dir("0123456789abcdef-9999", "/" + "t" * length))
    assert len(name) <= (107 if sys.platform == "linux" else 103)
