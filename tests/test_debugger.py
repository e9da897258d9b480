"""A rank that waits for a debugger, and others that wait for it."""

from __future__ import annotations

import sys

import pytest

import hvdlite as hvd
from hvdlite.environment import read_environment
from hvdlite.runtime.world import current_world


class Debugpy:
    """Stands in for debugpy: notes what is called, and is connected once somebody has waited."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def is_client_connected(self) -> bool:
        return "waited" in self.calls

    def listen(self, address: tuple[str, int]) -> tuple[str, int]:
        self.calls.append(address[0])
        return address[0], address[1] or 40000

    def wait_for_client(self) -> None:
        self.calls.append("waited")


@pytest.fixture
def debugpy(monkeypatch):
    stand_in = Debugpy()
    monkeypatch.setitem(sys.modules, "debugpy", stand_in)
    monkeypatch.setenv("HVDLITE_DEBUG_RANK", "0")
    return stand_in


def test_it_waits_in_init_on_loopback_and_says_where(debugpy, capsys):
    hvd.init()
    assert debugpy.calls == ["127.0.0.1", "waited"]
    assert "rank 0 on " in (err := capsys.readouterr().err)
    assert " waits for a debugger at 127.0.0.1:" in err
    hvd.shutdown()
    hvd.init()
    assert debugpy.calls == ["127.0.0.1", "waited"], "the debugger is still there"


def test_without_debugpy_the_error_says_what_to_install(debugpy, monkeypatch):
    monkeypatch.setitem(sys.modules, "debugpy", None)
    with pytest.raises(hvd.LaunchEnvironmentError, match=r"rank 0 is to be debugged .* pip install debugpy"):
        hvd.init()
    assert not hvd.is_initialized()


def test_a_rank_that_is_not_there_is_an_error(debugpy, monkeypatch):
    monkeypatch.setenv("HVDLITE_DEBUG_RANK", "3")
    with pytest.raises(ValueError, match=r"HVDLITE_DEBUG_RANK=3 \(--debug-rank\): the ranks are 0 to 0; name one"):
        hvd.init()
    assert debugpy.calls == []
    assert not hvd.is_initialized()


def test_ranks_wait_for_one_that_is_debugged_without_limit_unless_they_are_given_one(debugpy):
    hvd.init()
    assert not current_world().environment.stall_check
    assert read_environment({"HVDLITE_DEBUG_RANK": "1"}).timeout_s == 2e6
    assert read_environment({"HVDLITE_DEBUG_RANK": "1", "HVDLITE_GLOO_TIMEOUT_SECONDS": "5"}).timeout_s == 5
    with pytest.raises(ValueError, match="HVDLITE_DEBUG_RANK='one' is not a rank"):
        read_environment({"HVDLITE_DEBUG_RANK": "one"})
