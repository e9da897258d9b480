"""What each call of `horovod.torch` comes to is what it came to in Horovod 0.28.1, or it is said below why not.

`recorded.json` has what Horovod itself did (see `record.py`); `horovod_calls.py` makes the same calls of hvdlite, with
not a line changed, with 1 to 4 ranks, through shared memory and through gloo; some of these without
TEST_HVDLITE_LONG=1.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from long_run import chosen

HERE = Path(__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "from-horovod.md"
RECORDED = json.loads((HERE / "recorded.json").read_text())

# Functions that are not called within a running job, or that only describe the build.
NOT_CALLED = {"check_extension", "init", "shutdown"}

IN_BACKTICKS = re.compile(r"`(\w+)`")
# What hvdlite does otherwise, in the words of docs/from-horovod.md: of the matching calls at least one differs at some
# size.
DIFFERENT = {
    r"(grouped_)?(allreduce|reducescatter)\w*\(tensors?\): torch\.(u?int8|int16|bool|bfloat16)": "any dtype",
    r"\w*(allgather|broadcast_?|alltoall)\w*\(tensors?\): torch\.(bool|bfloat16)": "any dtype",
    r"\w+\(tensors?\): not contiguous": "any layout",
    r"allgather\(tensor\): a scalar": "a scalar counts as one row",
    r"allreduce(_async)?\(tensor\): a number": "if it is no tensor, a TypeError and no AttributeError",
    r"grouped_allreduce\(tensors\): none": "no tensors give none",
    r"(grouped_)?allreduce\w*\(op\): (gradient of )?Adasum.*": "`Adasum` without MPI, at any number of ranks",
    r"poll\(handle\): of one that was synchronized": "True for a finished operation, however often you ask",
    r"synchronize\(handle\): twice": "the result again, and not None",
    r"broadcast_parameters\(params\): a generator": "a generator too",
    r"broadcast_parameters\(params\): a number in a dict": "if it is no tensor, a TypeError and no AttributeError",
    r"broadcast_parameters\(root_rank\): left out": "0 where it is left out",
    r"broadcast_optimizer_state\(optimizer\): an option that rank 0 alone has": "options that the root alone has",
    r"DistributedOptimizer\(op\): Adasum.*": "`Adasum` without MPI, at any number of ranks, in process sets too",
    r"DistributedOptimizer\.skip_synchronize\(\): with Adasum": "as in Horovod; `Adasum` is there without MPI",
    r"DistributedOptimizer\(optimizer\): attributes that programs look at":
        "`_requires_update` has its parameters at one rank too",
    r"DistributedOptimizer\(groups\): 2.5": "an error at one rank too",
    r"DistributedOptimizer\(backward_passes_per_step\): one pass too many": "an error at one rank too",
    r"DistributedOptimizer\.zero_grad\(\): before step": "an error at one rank too",
    r"DistributedOptimizer\(optimizer\): its class": "a class of its own",
    r"broadcast_optimizer_state\(optimizer\): without .*": "no step is taken, and options alone are broadcast too",
    r"add_process_set\(process_set\): later than init": "at any time",
    r"mpi_built\(\): and its kin": "`mpi_threads_supported` is False without MPI, and no ValueError",
    r"SyncBatchNorm\(num_features\): on a CPU": "on CPUs too",
}  # fmt: skip


def outcomes(size: int, path: str) -> list[dict[str, Any]]:
    """Returns the outcome of each call in hvdlite, by rank."""
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(size)]


def recorded(name: str, size: int) -> list[Any]:
    """Returns the recorded outcome of each call in Horovod, by rank."""
    of_size = RECORDED["calls"][name][str(size)]
    return of_size if isinstance(of_size, list) else [of_size] * size


def agree(theirs: Any, ours: Any, tolerance: float) -> bool:
    """Whether results are equal but for the last bit of a float: the order of additions is not promised."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return theirs.keys() == ours.keys() and all(agree(theirs[key], ours[key], tolerance) for key in theirs)
    if isinstance(theirs, list) and isinstance(ours, list):
        return len(theirs) == len(ours) and all(map(agree, theirs, ours, [tolerance] * len(ours)))
    # JSON has floats without a fraction as ints.
    if isinstance(theirs, float) or isinstance(ours, float):
        return math.isclose(theirs, ours, rel_tol=tolerance, abs_tol=tolerance)
    return bool(theirs == ours)


def does_the_same(name: str, theirs: Any, ours: Any) -> bool:
    """Whether a call had the same result, or raised an error that every handler of Horovod's error catches."""
    if "raises" in theirs:
        return "raises" in ours and set(theirs["raises"]) <= set(ours["raises"])
    # Averages in 16 bits are scaled before the sum, and not after it.
    return agree(theirs, ours, 2e-3 if "16" in name else 2e-7)


def why_different(name: str) -> str | None:
    """Returns the words for what hvdlite does otherwise in a call."""
    return next((words for pattern, words in DIFFERENT.items() if re.fullmatch(pattern, name)), None)


def calls_that_differ(size: int, path: str) -> dict[str, str]:
    """Returns the calls whose outcome differs on some rank, with the difference."""
    ours = outcomes(size, path)
    assert all(set(each) == set(RECORDED["calls"]) for each in ours)
    told = {}
    for name in RECORDED["calls"]:
        for rank, (theirs, own) in enumerate(zip(recorded(name, size), [each[name] for each in ours], strict=True)):
            if not does_the_same(name, theirs, own):
                told[name] = f"rank {rank} of {size}: Horovod: {theirs}; here: {own}"
    return told


GLOO = {"HVDLITE_SHM": "0"}
JOBS = chosen(
    [(1, {}), (2, {}), (3, {}), (4, {}), (2, GLOO), (3, GLOO), (4, GLOO)],
    few=[(1, {}), (3, {}), (2, GLOO)],
)


@pytest.fixture(scope="module")
def job(tmp_path_factory, rank_server):
    """Returns the calls that differ in a job of this size; the job runs once."""

    @functools.cache
    def run(size: int, **environment: str) -> dict[str, str]:
        path = tmp_path_factory.mktemp("job")
        ended = subprocess.run(
            [
                *(sys.executable, *rank_server.launcher(), "--horovod", "-np", str(size)),
                *(sys.executable, str(HERE / "horovod_calls.py"), str(path / "outcomes")),
            ],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=200, cwd=path, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr[-3000:]
        return calls_that_differ(size, str(path / "outcomes"))

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("size", "environment"), JOBS)
def test_a_call_comes_to_what_it_came_to_in_horovod(job, size, environment):
    assert {name: told for name, told in job(size, **environment).items() if why_different(name) is None} == {}


@pytest.mark.slow
def test_what_is_said_to_differ_does_so_somewhere(job):
    differ = [name for size in (1, 3) for name in job(size)]
    assert [pattern for pattern in DIFFERENT if not any(re.fullmatch(pattern, name) for name in differ)] == []


def test_every_argument_of_horovods_functions_is_in_some_call():
    called = {match.groups() for name in RECORDED["calls"] if (match := re.match(r"([\w.]+)\((\w+)\)", name))}
    assert [
        f"{function}({argument})"
        for function, arguments in RECORDED["arguments"].items()
        for argument in arguments
        if function not in NOT_CALLED and (function, argument) not in called
    ] == []


def rows() -> Iterator[tuple[str, set[str], set[str]]]:
    """Returns of each row of the page's table of arguments: function, arguments that are as in Horovod, and others."""
    table = PAGE.read_text().split("## Function by function")[1].split("\n## ")[0]
    for line in table.splitlines():
        if match := re.fullmatch(r"\| `([\w]+)` \| (.*?) \| (.*) \|", line):
            function, same, other = match.groups()
            yield function, set(IN_BACKTICKS.findall(same)), set(re.findall(r"`(\w+)`:", other))


def test_the_page_says_of_each_argument_whether_it_is_as_in_horovod():
    told = {function: (same, other) for function, same, other in rows()}
    expected = {}
    for function, arguments in RECORDED["arguments"].items():
        if function in NOT_CALLED:
            continue
        other = {
            argument
            for argument in arguments
            if any(name.startswith(f"{function}({argument})") and why_different(name) for name in RECORDED["calls"])
        }
        expected[function] = (set(arguments) - other, other)
    assert told == expected
