"""The load of a host: counters of its network, and what nvidia-smi says of its GPUs."""

import os
import selectors

import pytest
from hvdlite_launcher.host import status_collector
from hvdlite_launcher.host.status_collector import HostLoad, network_bytes, read_nvidia_smi
from hvdlite_wire.worker_status import HostUsage

DEVICES = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0
  eth0:12345678     9    0    0    0     0          0         0 87654321      10    0    0    0     0       0
"""
SMI = """#!/bin/sh
echo asked >> "$0.asked"
case "$1" in
--query-gpu=*) printf 'GPU-a, 93\\nGPU-b, [N/A]\\nGPU-c, 7\\n' ;;
*) printf '41, GPU-c\\n[Not Found]\\n' ;;
esac
"""


@pytest.fixture
def load(monkeypatch, tmp_path):
    """A host with an nvidia-smi on its PATH, and a clock that stands still."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    selector, clock = selectors.DefaultSelector(), [0.0]
    load = HostLoad(selector, lambda: clock[0])

    def usage():
        first = load.usage()
        while selector.get_map():
            for key, _ in selector.select(60):
                key.data()
        return first

    yield usage, load, clock, tmp_path / "nvidia-smi.asked"
    selector.close()


def test_bytes_over_the_network_include_what_goes_past_the_kernel(tmp_path):
    (tmp_path / "dev").write_text(DEVICES)
    for direction, words in (("xmit", 10), ("rcv", 20)):
        for port in (1, 2):
            (tmp_path / f"{port}_{direction}").write_text(f"{words}\n")
    found = network_bytes("eth0", str(tmp_path / "dev"), str(tmp_path / "*_%s"))
    assert found == (87654321 + 80, 12345678 + 160)
    assert network_bytes("eth1", str(tmp_path / "dev"), str(tmp_path / "*_%s")) is None
    assert network_bytes("eth0", str(tmp_path / "missing")) is None


def test_a_host_without_others_tells_of_no_network(load):
    usage, host, _, _ = load
    assert usage() == HostUsage()
    host.follow("lo")
    assert None not in (usage().sent, usage().received)


def test_bytes_are_counted_from_the_beginning_of_the_job(monkeypatch):
    counts = {"eth0": (1000, 100)}
    monkeypatch.setattr(status_collector, "network_bytes", counts.get)
    load = HostLoad(selectors.DefaultSelector())
    load.follow("eth0")
    assert load.network() == HostUsage(0, 0)
    counts["eth0"] = (1020, 103)
    assert load.network() == HostUsage(20, 3)
    counts.clear()  # an interface that has gone
    assert load.network() == HostUsage()


def test_gpus_are_asked_for_at_most_each_10_s_and_told_of_with_the_next_question(load):
    usage, host, clock, asked = load
    assert usage().gpus == ()
    assert usage().gpus == (0.93, 0.07)
    assert (host.gpu_use(41), host.gpu_use(42)) == (0.07, None)
    assert asked.read_text() == "asked\n" * 2
    clock[0] = 10.0
    usage()
    assert asked.read_text() == "asked\n" * 4


def test_an_nvidia_smi_that_finds_no_gpu_is_asked_once(load):
    usage, _, clock, asked = load
    asked.with_name("nvidia-smi").write_text('#!/bin/sh\necho asked >> "$0.asked"; echo no driver; exit 9')
    for second in range(0, 100, 10):
        clock[0] = float(second)
        assert usage().gpus == ()
    assert asked.read_text() == "asked\n"


@pytest.mark.parametrize("text", ["", "\n\n", "GPU-a", "GPU-a, x\n\nx, GPU-a", ", \n\n, "])
def test_nonsense_of_nvidia_smi_is_left_out(text):
    assert read_nvidia_smi(text) == ({}, {})
