"""Children that ranks fork, at any point of training, leave parameters as they are, and end well themselves."""

import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "forking_program.py"
ENDED_S = 200

pytestmark = pytest.mark.slow

JOBS = {
    "shared memory": ((), {}, ()),
    "gloo": ((), {"HVDLITE_SHM": "0"}, ()),
    "elastic": (("--min-np", "2"), {}, ("elastic",)),
    "surviving": (("--min-np", "1", "--survive"), {}, ("elastic",)),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "shared memory" else pytest.mark.night) for kind in JOBS]
)
def test_ranks_train_as_without_children_whatever_these_do(launch, kind):
    flags, env, arguments = JOBS[kind]
    job = launch("-np", "2", *flags, sys.executable, str(PROGRAM), *arguments, env=env)
    code, out, err = job.ended(ENDED_S)
    assert code == 0, err.decode()
    assert out.count(b"done") == 2
    assert out.count(b"ok: ") == 12
    assert b"Exception ignored" not in err, err.decode()
    job.assert_gone()


FORKS_IN_FUNCTION = """
import os, hvdlite_launcher

def fork(how):
    child = os.fork()
    if child == 0:
        if how == "raises":
            raise ValueError("of the child")
        return "of the child"
    os.waitpid(child, 0)
    return how

for how in ("raises", "returns"):
    assert hvdlite_launcher.run(fork, args=(how,), np=1) == [how]
"""


@pytest.mark.night
def test_a_child_of_a_function_in_workers_returns_nothing_to_the_caller(launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FORKS_IN_FUNCTION)
    code, _, err = launch(str(program), program=()).ended(ENDED_S)
    assert code == 0, err.decode()
