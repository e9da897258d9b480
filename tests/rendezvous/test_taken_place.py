"""A program that a rank starts inherits the rank's place in the job, and must not take it."""

from __future__ import annotations

import os

import pytest

import hvdlite as hvd
from hvdlite.errors import LaunchEnvironmentError
from hvdlite.rendezvous.launchers import mark_taken, require_free

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.fixture
def by_another(monkeypatch):
    """Returns a function that marks a place as another process does."""

    def mark(environ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 7)
            mark_taken(environ)

    return mark


def test_the_place_of_the_rank_that_started_this_program_is_refused(by_another, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HVDLITE_PLACE_TAKEN", raising=False)
    by_another(os.environ)
    with pytest.raises(LaunchEnvironmentError, match=r"was started by a rank of the job \(pid 7\).*leave hvd.init"):
        hvd.init()
    os.environ.pop("HVDLITE_PLACE_TAKEN")


def test_the_rank_itself_another_place_and_no_place_are_free(by_another):
    own = dict(TORCHRUN)
    mark_taken(own)
    require_free(own)
    taken = dict(TORCHRUN)
    by_another(taken)
    require_free({**taken, "MASTER_PORT": "4321"})
    require_free({"HVDLITE_PLACE_TAKEN": taken["HVDLITE_PLACE_TAKEN"]})


def test_the_only_rank_of_a_job_leaves_no_mark(by_another):
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    by_another(alone)
    require_free(alone)
    assert "HVDLITE_PLACE_TAKEN" not in alone


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"])
def test_variables_that_are_not_a_whole_place_are_no_error(by_another, missing):
    """As in a process whose group was made before `hvd.init`, which says itself what is missing if it needs it."""
    some = {name: value for name, value in TORCHRUN.items() if name != missing}
    by_another(some)
    require_free({**some, "HVDLITE_PLACE_TAKEN": "7 of another"})
