"""The line that rank 0 logs at the start: ranks, hosts, and how tensors are sent between them."""

from __future__ import annotations

import logging

import pytest
import torch

import hvdlite as hvd
from hvdlite.comm.engine import SingleRankEngine
from hvdlite.comm.hierarchy import HierarchicalEngine, HostGroups
from hvdlite.environment import Environment
from hvdlite.log import open_log
from hvdlite.runtime.make_world import describe_start, log_startup
from hvdlite.shm.setup import DeviceEngine
from hvdlite.shm.shm_engine import ShmEngine


class Flat(SingleRankEngine):
    """Stands for one of several ranks, over gloo on CPUs."""

    def __init__(self, on_gpus: str = "gloo") -> None:
        super().__init__()
        self.ways = {"cpu": ("gloo",), "cuda": (on_gpus,)}


FLAT = Flat()
SHARED = object.__new__(ShmEngine)


def levels(scatter: object, *devices: str, flat: Flat = FLAT) -> HierarchicalEngine:
    return HierarchicalEngine(flat, scatter, flat, flat, HostGroups((0, 1), (0, 2), ((0, 1), (2, 3))), set(devices))


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")


@pytest.mark.parametrize(
    ("engine", "nodes", "environment", "said"),
    [
        (SHARED, "aa", Environment(), "2 ranks on 1 host; CPU tensors: shared memory; OMP threads 3; check on"),
        (
            levels(SHARED, "cpu"),
            "aabb",
            Environment(check=False),
            "4 ranks on 2 hosts (2 + 2); CPU tensors: shared memory within hosts, gloo (eth0) between; OMP threads 3; "
            "check off",
        ),
        (
            levels(FLAT, "cpu"),
            "aabb",
            Environment(),
            "4 ranks on 2 hosts (2 + 2); CPU tensors: gloo (eth0) within hosts, gloo (eth0) between; OMP threads 3; "
            "check on",
        ),
        (FLAT, "ab", Environment(), "2 ranks on 2 hosts (1 + 1); CPU tensors: gloo (eth0); OMP threads 3; check on"),
        (FLAT, "a", Environment(), "1 rank on 1 host; OMP threads 3"),
    ],
)
def test_it_has_ranks_hosts_the_ways_of_tensors_and_threads(engine, nodes, environment, said):
    assert describe_start(engine, nodes, environment) == said


@pytest.mark.parametrize(
    ("nodes", "environment", "why"),
    [
        ("aa", Environment(shm=False), "HVDLITE_SHM=0"),
        ("aa", Environment(), "there is too little shared memory"),
        ("aab", Environment(), "hosts have different numbers of ranks"),
        ("aabb", Environment(hierarchical=False), "hierarchical all-reduces are turned off"),
    ],
)
def test_where_there_is_no_shared_memory_though_ranks_share_a_host_it_says_why(nodes, environment, why):
    said = describe_start(FLAT, nodes, environment)
    assert f"CPU tensors: gloo (eth0), not shared memory: {why};" in said


def test_tensors_of_gpus_have_a_way_of_their_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    nccl = DeviceEngine(SHARED, Flat("nccl"))
    assert "; CUDA tensors: NCCL 2.28.9;" in describe_start(nccl, "aa", Environment())
    # A program that has initialised torch.distributed itself may have chosen this.
    assert "; CUDA tensors: gloo;" in describe_start(DeviceEngine(SHARED, FLAT), "aa", Environment())
    two = describe_start(levels(nccl, "cpu", "cuda", flat=Flat("nccl")), "aabb", Environment())
    assert "; CUDA tensors: NCCL 2.28.9, within hosts and then between;" in two


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        (Environment(), ""),
        (Environment(verbose=True), "hvdlite: 1 rank on 1 host; OMP threads 3\n"),
        (Environment(verbose=True, log_level=logging.WARNING), "hvdlite: 1 rank on 1 host; OMP threads 3\n"),
        (
            Environment(verbose=True, log_level=logging.INFO, log_hide_time=True),
            "hvdlite[0] INFO: 1 rank on 1 host; OMP threads 3\n",
        ),
    ],
)
def test_it_is_said_once_and_only_where_it_is_asked_for(environment, seen, capsys):
    open_log(environment, 0)
    try:
        log_startup(FLAT, "a", environment)
    finally:
        open_log(Environment(), 0)
    assert capsys.readouterr().err == seen


def test_init_says_it_where_the_variable_asks_for_it(monkeypatch, capsys):
    monkeypatch.setenv("HVDLITE_VERBOSE", "1")
    hvd.init()
    hvd.shutdown()
    assert capsys.readouterr().err == "hvdlite: 1 rank on 1 host; OMP threads 3\n"
