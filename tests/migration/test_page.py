"""docs/from-horovod.md lists every name of Horovod's, and what it says of each is true."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from pathlib import Path

import horovod_names as horovod
import pytest
from hvdlite_launcher.cli.flag_parser import Parser
from hvdlite_launcher.cli.horovodrun_flags import FLAGS
from hvdlite_launcher.plan.worker_environment import OWN_VARIABLES

import hvdlite
import hvdlite.horovod
import hvdlite.torch as hvd
from hvdlite.environment import read_environment
from hvdlite.horovod.finder import MODULES as TABLE

PAGE = Path(__file__).parents[2] / "docs" / "from-horovod.md"
STATES = {"same", "better", "ignored", "refused", "not there"}


def rows() -> list[tuple[str, str, str]]:
    """Returns name, state and remark of each row; names that share a row each for itself."""
    found = []
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\| (`.+?) \| ([a-z ]+) \|(.*)\|", line):
            names, state, words = match.groups()
            found += [(name, state, words.strip()) for name in re.findall(r"`([^`]+)`", names)]
    return found


STATE_OF = {name: state for name, state, _ in rows()}
OF_RUN = {f"run({name})" for name in horovod.RUN_ARGUMENTS}
OF_OPTIMIZER = {f"DistributedOptimizer({name})" for name in horovod.OPTIMIZER_ARGUMENTS}
METHODS = {f"DistributedOptimizer.{name}" for name in horovod.OPTIMIZER_METHODS}
MODULES = {*horovod.MODULES, *horovod.OPTIONAL_MODULES, *horovod.NOT_THERE_MODULES}


def test_every_name_of_horovods_has_one_row_and_no_row_is_of_another():
    names = {*horovod.TORCH, *horovod.FLAGS, *horovod.VARIABLES, *OF_RUN, *OF_OPTIMIZER, *METHODS, *MODULES}
    counts = Counter(name for name, _, _ in rows())
    assert set(counts) == names
    assert [name for name, count in counts.items() if count > 1] == []
    assert set(STATE_OF.values()) == STATES


def test_a_state_that_is_not_same_comes_with_a_word():
    assert [name for name, state, words in rows() if state != "same" and not words] == []


@pytest.mark.parametrize("name", horovod.TORCH)
def test_a_name_is_there_unless_it_is_said_not_to_be(name):
    assert hasattr(hvd, name) == (STATE_OF[name] != "not there")


def test_the_optimizers_arguments_and_methods_are_there():
    assert [f"DistributedOptimizer({name})" for name in inspect.signature(hvd.DistributedOptimizer).parameters][
        : len(OF_OPTIMIZER)
    ] == [name for name in STATE_OF if name in OF_OPTIMIZER]
    for name in METHODS:
        assert callable(functools.reduce(getattr, name.split("."), hvd))


def test_runs_arguments_are_there():
    assert {f"run({name})" for name in inspect.signature(hvdlite.horovod.run).parameters} == OF_RUN


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_is_there_unless_it_is_said_not_to_be(name):
    # Not by an import: some import packages that need not be installed, such as Ray.
    path = Path(hvdlite.__file__).parent.joinpath(*name.split("."))
    is_file = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
    is_there = is_file or name.removeprefix("horovod.") in TABLE
    assert is_there == (STATE_OF[name] == "same")


@pytest.mark.parametrize("name", horovod.FLAGS)
def test_a_flag_does_what_the_page_says(name):
    assert any(name in action.option_strings for action in Parser().flags)
    is_idle = any(flag.variable is None for flag in FLAGS if name in flag.names)
    expected = "ignored" if is_idle else None
    assert STATE_OF[name] == expected or (expected is None and STATE_OF[name] in ("same", "better"))


@pytest.mark.parametrize("name", horovod.VARIABLES)
def test_a_variable_means_what_the_page_says(name):
    value = {"HOROVOD_LOG_LEVEL": "debug", "HOROVOD_DYNAMIC_PROCESS_SETS": "yes"}.get(name, "7")
    is_switch = name.endswith(("_DISABLE", "_HIDE_TIME", "_ALLREDUCE", "HOROVOD_ELASTIC", "HOROVOD_AUTOTUNE"))
    value = "1" if is_switch else value
    said = read_environment({name: value})
    is_read = said != read_environment({}) and not said.remarks
    has_remark = any(name in remark for remark in said.remarks)
    of_launcher = name in OWN_VARIABLES or re.fullmatch("HOROVOD_(SPARK_|ELASTIC_)?(START_)?TIMEOUT", name)
    expected = "same" if is_read or of_launcher else "ignored" if has_remark else "not there"
    assert STATE_OF[name] == expected
