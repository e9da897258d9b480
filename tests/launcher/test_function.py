"""What is refused before anything is started for a function."""

import pickle
import subprocess
import threading

import pytest
from hvdlite_launcher import run

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "culprit"),
    [
        (LOCK.acquire, (), {}, "func"),
        (lambda: LOCK, (), {}, "func"),
        (print, (1, LOCK), {}, "args"),
        (print, (), {"end": LOCK}, "kwargs"),
    ],
)
def test_what_cannot_be_sent_to_the_workers_is_named(func, args, kwargs, culprit):
    with pytest.raises(pickle.PicklingError, match=rf"^{culprit} cannot be pickled, .*: .*lock"):
        run(func, args, kwargs, np=1)


def test_arguments_that_are_none_are_named():
    with pytest.raises(TypeError, match=r"run\(\): args=1 is no sequence of arguments, such as \(1,\)"):
        run(print, 1, np=1)
    with pytest.raises(TypeError, match=r"run\(\): args='ab' is no sequence"):
        run(print, "ab", np=1)
    with pytest.raises(TypeError, match=r"run\(\): kwargs=\('a',\) is no mapping"):
        run(print, (), ("a",), np=1)


@pytest.mark.parametrize(
    ("flags", "error", "said"),
    [
        ({"nmp": 2}, TypeError, "run() has no argument 'nmp'; did you mean np?"),
        ({"prefix_output_with_timestmp": True}, TypeError, "did you mean prefix_output_with_timestamp?"),
        ({"dry_run": True}, TypeError, "run() has no argument 'dry_run'"),
        ({"np": 0}, ValueError, "np: '0' is not a number of workers, such as 4"),
        ({"np": True}, ValueError, "np: 'True' is not a number of workers"),
        ({"np": [1]}, ValueError, "np: it must be a single value, not a list"),
        ({"np": 1, "grace": -1}, ValueError, "grace: '-1' is not a number of seconds"),
        ({"np": 1, "verbose": 2}, ValueError, "verbose: '2' is neither true nor false"),
        ({"np": 1, "environment": {"A=B": 1}}, ValueError, "environment: a name has no = in it"),
    ],
)
def test_what_is_no_flag_is_named(flags, error, said):
    with pytest.raises(error) as caught:
        run(print, **flags)
    assert said in str(caught.value)
