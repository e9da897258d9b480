"""What a process keeps from one world to the next, and what it restores."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from hvdlite.rendezvous.process_state import ProcessState


def test_meetings_are_counted_for_each_place_by_itself():
    process = ProcessState()
    places = [("127.0.0.1", "29500"), ("127.0.0.1", "29501"), ("127.0.0.1", "29500"), "unix:///store"]
    assert [process.next_init(place) for place in places] == [0, 0, 1, 0]
    groups = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1) for _ in range(2)]
    assert [process.next_init_in(group) for group in (groups[0], groups[1], groups[0])] == [0, 0, 1]


def test_what_cannot_be_opened_is_not_kept():
    process = ProcessState()

    def fails() -> str:
        raise RuntimeError("nobody is there")

    assert process.keep("store", "here", lambda: "a store") == "a store"
    with pytest.raises(RuntimeError, match="nobody is there"):
        process.keep("store", "there", fails)
    assert process.keep("store", "there", lambda: "another") == "another"
    assert process.keep("store", "there", fails) == "another"


def test_an_interface_is_chosen_for_one_world_and_a_users_own_choice_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that the test restores it, also if it was unset
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    process = ProcessState()
    process.choose_interface("lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    process.world_left()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    process.choose_interface(None)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    # A value that the program sets while it is in a world holds for the next world too.
    process.choose_interface("lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    process.world_left()
    process.choose_interface("lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    process.world_left()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
