"""The problems that --check finds in the facts of several hosts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hvdlite_launcher.check.diagnosis import TORCH_BELOW, TORCH_FROM, diagnose
from hvdlite_launcher.check.host_facts import SOURCE_TREE, Facts
from hvdlite_launcher.version import VERSION

CPU = Facts(
    python="3.11.2",
    executable="/usr/bin/python3",
    cores=4,
    cwd=True,
    sockets="eth0",
    interfaces=("lo", "eth0"),
    torch="2.13.0+cpu",
    gloo=True,
    hvdlite=VERSION,
)
GPU = replace(CPU, torch="2.13.0+cu130", cuda="13.0", nccl="2.27.3", gpus=("H200", "H200"), devices=2)


def wrong(**hosts):
    """Returns the problems that are found, as (host, title, words)."""
    judged = diagnose(hosts, "/work")
    return [(host, title, cell.wrong) for host, cells in judged.items() for title, cell in cells.items() if cell.wrong]


@pytest.mark.parametrize("facts", [CPU, GPU])
def test_hosts_that_are_alike_are_well(facts):
    assert wrong(a=facts) == []
    assert wrong(a=facts, b=replace(facts, hvdlite=SOURCE_TREE)) == []
    assert wrong(a=facts, b=facts, c=replace(facts, cores=64, python="3.11.9", torch="2.13.1")) == []


def test_hosts_may_have_different_numbers_of_gpus():
    assert wrong(a=GPU, b=replace(GPU, gpus=("H100",))) == []


# The host ``odd``, between two hosts like CPU, has the facts in the second column; the third is part of its problem.
ODD = [
    ("Python", replace(CPU, python="3.10.1"), "Python is 3.10, but 3.11 on a"),
    ("torch", replace(CPU, torch="2.12.1"), "torch is 2.12, but 2.13 on a"),
    ("torch", replace(CPU, torch=None, torch_error="ImportError: no"), "cannot be imported (ImportError: no)"),
    ("torch", replace(CPU, torch="2.10.9"), "2.10.9 is not supported: install 2.11 or later, below 3"),
    ("torch", replace(CPU, torch="3.0.0a1"), "3.0.0a1 is not supported"),
    ("torch", replace(CPU, gloo=False), "has no gloo"),
    ("GPUs", GPU, "it has GPUs, but a has none"),
    ("GPUs", replace(CPU, devices=1), "torch cannot use its GPU: it is built without CUDA"),
    (
        "GPUs",
        replace(CPU, devices=2, cuda="13.0", cuda_error="driver too old"),
        "torch cannot use its 2 GPUs: driv",
    ),
    ("hvdlite", replace(CPU, hvdlite=None, hvdlite_error="gone"), "(gone): pip install it for /usr/bin/python3"),
    ("hvdlite", replace(CPU, hvdlite="0.0.1"), f"hvdlite is 0.0.1, but {VERSION} on this machine"),
    ("network", replace(CPU, sockets="ib0"), "GLOO_SOCKET_IFNAME names ib0, but this host has lo, eth0"),
    ("directory", replace(CPU, cwd=False), "/work does not exist"),
]


@pytest.mark.parametrize(("title", "odd", "words"), ODD)
def test_the_odd_one_out_is_told_and_no_other(title, odd, words):
    ((host, where, told),) = wrong(a=CPU, odd=odd, c=CPU)
    assert (host, where) == ("odd", title)
    assert words in told


ODD_GPU = [
    ("CUDA", replace(GPU, cuda="12.8"), "CUDA of torch is 12, but 13 on a"),
    ("NCCL", replace(GPU, nccl="2.26.2"), "NCCL is 2.26.2, but 2.27.3 on a"),
    ("NCCL", replace(GPU, nccl=None), "has no NCCL"),
    ("GPUs", replace(GPU, gpus=(), devices=0), "it has no GPU, but a has GPUs"),
]


@pytest.mark.parametrize(("title", "odd", "words"), ODD_GPU)
def test_among_hosts_with_gpus_too(title, odd, words):
    ((host, where, told),) = wrong(a=GPU, odd=odd, c=GPU)
    assert (host, where) == ("odd", title)
    assert words in told


def test_of_two_hosts_the_first_is_right():
    ((host, _, told),) = wrong(b=CPU, a=replace(CPU, python="3.12.0"))
    assert (host, told[:30]) == ("a", "Python is 3.12, but 3.11 on b:")


def test_without_torch_nothing_else_is_held_against_a_host():
    bare = Facts(python="3.11.2", executable="p", cores=4, cwd=True, hvdlite=VERSION, torch_error="no", devices=8)
    assert [(host, title) for host, title, _ in wrong(a=GPU, b=bare)] == [("b", "torch")]


def test_the_torch_that_is_right_is_the_one_that_hvdlite_requires():
    pyproject = Path(__file__).parents[3] / "pyproject.toml"
    required = re.search(r'"torch>=([\d.]+),<([\d.]+)"', pyproject.read_text())
    assert required.groups() == (".".join(map(str, TORCH_FROM)), ".".join(map(str, TORCH_BELOW)))
