"""The facts that a host reports of itself, also where a module that it would import is broken."""

import inspect
import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
from hvdlite_launcher.check import host_facts
from hvdlite_launcher.check.host_facts import Facts
from hvdlite_launcher.check.run_check import facts_from
from hvdlite_launcher.system import machine
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT, COUNTS = map(inspect.getsource, (host_facts, machine))
FACTS = Facts(python="3.11.2", executable="/usr/bin/python3", cores=4, cwd=True, gpus=("H200",), interfaces=("lo",))


def _probed(tmp_path, *, cwd="/", env=None, counts=COUNTS, **modules):
    """Returns the facts that a Python reports which has only these modules and the standard library."""
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), **(env or {})}
    words = [sys.executable, "-S", "-c", TEXT, cwd, counts]
    out = subprocess.run(words, env=environ, cwd="/", stdout=subprocess.PIPE, text=True, check=True).stdout
    facts = facts_from(out)
    assert facts is not None, out
    return facts


def test_a_python_without_torch_and_hvdlite_says_so(tmp_path):
    facts = _probed(tmp_path, cwd=str(tmp_path / "none"), env={"GLOO_SOCKET_IFNAME": "eth7"})
    assert (facts.torch, facts.torch_error) == (None, "ModuleNotFoundError: No module named 'torch'")
    assert (facts.hvdlite, facts.hvdlite_error) == (None, "ModuleNotFoundError: No module named 'hvdlite'")
    assert (facts.python, facts.executable) == (sys.version.split()[0], sys.executable)
    assert facts.cores == machine.usable_cores()
    assert (facts.cwd, facts.sockets) == (False, "eth7")
    assert "lo" in facts.interfaces


def test_cores_are_counted_as_for_jobs_with_the_quota_of_the_host_s_cgroup(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    counts = COUNTS
    for name, place in (("/proc/self/cgroup", tmp_path / "cgroup"), ("/sys/fs/cgroup", tmp_path)):
        assert name in counts
        counts = counts.replace(name, str(place))
    assert _probed(tmp_path, counts=counts).cores == 1


def test_hvdlite_without_torch_is_there(tmp_path):
    facts = _probed(tmp_path, hvdlite="import torch")
    assert facts.hvdlite == host_facts.SOURCE_TREE
    assert facts.hvdlite_error is None


@pytest.mark.parametrize(
    ("torch", "error"),
    [
        ("raise OSError('libcudart.so: cannot open\\nand more')", "OSError: libcudart.so: cannot open"),
        ("", "AttributeError: module 'torch' has no attribute 'distributed'"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
    ],
)
def test_a_torch_that_breaks_is_told_and_breaks_nothing_else(tmp_path, torch, error):
    facts = _probed(tmp_path, torch=f"print('hello')\n{torch}")
    assert (facts.torch, facts.torch_error) == (None, error)


def test_what_was_found_comes_through_json_as_it_was():
    assert facts_from(json.dumps([*asdict(FACTS).values()])) == FACTS


@pytest.mark.parametrize("change", [{"cores": "4"}, {"gpus": "H200"}, {"gpus": [1]}, {"torch": 2}, {"more": 1}])
def test_what_is_not_as_it_should_be_is_no_facts(change):
    assert facts_from(json.dumps([*{**asdict(FACTS), **change}.values()])) is None


@settings(max_examples=50)
@given(st.text() | st.recursive(st.none() | st.integers(), st.lists, max_leaves=3).map(json.dumps))
def test_whatever_is_printed_is_facts_or_not(line):
    assert facts_from(line) is None
