"""What follows a `Survival`, such as a sampler, hears of each step and of each loss with the notes of the others."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hvdlite_wire.codec import decode, encode
from hvdlite_wire.store_requests import RankAssignment

from hvdlite.errors import PeerLostError
from hvdlite.rendezvous.elastic_store import LastVotes
from hvdlite.runtime import survival as module
from hvdlite.runtime.survival import Note, Outcome, RankReport, Survival


class Noted:
    """Writes down what it is told."""

    def __init__(self, kind="sampler"):
        self.kind, self.told = kind, []

    def note_vote(self, number):
        self.told.append(("vote", number))

    def note_discarded(self, number):
        self.told.append(("discarded", number))

    def note_of(self, number):
        return {"in": number}

    def go_on(self, notes):
        self.told.append(("go on", notes))

    def begin_again(self, number):
        self.told.append(("begin again", number))


def survival_that_hears(monkeypatch, other, newcomers=0):
    """One whose next world has one rank besides it, which reports the same, as ``other`` changes it."""
    monkeypatch.setattr(module, "KeyListener", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(module, "StoreClient", SimpleNamespace(from_url=lambda _: Mock()))
    monkeypatch.setenv("HVDLITE_STORE", "unix:///nowhere")

    def all_gather_signed(data, what, at_most_bytes):
        return [data, encode(other(decode(RankReport, data)))]

    group = SimpleNamespace(all_gather_signed=all_gather_signed, describe_rank=str)
    survival = Survival(lambda: survival.begin(group, RankAssignment(2, 0, 2, newcomers)), lambda *_: None)
    return survival


def test_a_follower_gets_the_notes_of_all_ranks_and_the_votes(monkeypatch):
    survival = survival_that_hears(monkeypatch, lambda own: own._replace(votes=8))
    noted = Noted()
    survival.follow(noted)
    survival.note_passed(4)
    survival.go_on(PeerLostError("lost"), 4)
    assert noted.told == [("vote", 4), ("go on", [Note(1, {"in": 4}), Note(8, {"in": 4})])]


def test_one_that_other_ranks_lack_is_left_alone(monkeypatch):
    survival = survival_that_hears(monkeypatch, lambda own: own._replace(notes={"sampler#0": {"in": 1}}))
    older, newer, stranger = Noted(), Noted(), Noted("other")
    for each in (older, newer, stranger):
        survival.follow(each)
    survival.go_on(PeerLostError("lost"), 4)
    assert [len(each.told) for each in (older, newer, stranger)] == [0, 1, 0]


def test_one_that_is_in_its_last_step_draws_nothing_more(monkeypatch):
    # The other rank has heard of one whose program has ended after this step.
    left = (LastVotes({4: 1}),)
    survival = survival_that_hears(monkeypatch, lambda own: own._replace(left=left, identity="1.1"))
    noted = Noted()
    survival.follow(noted)
    assert survival.go_on(PeerLostError("lost"), 4) is Outcome.HAS_AVERAGES
    assert noted.told == []


def test_a_step_that_is_given_up_for_newcomers_is_begun_again(monkeypatch):
    survival = survival_that_hears(monkeypatch, lambda own: own, newcomers=1)
    noted = Noted()
    survival.follow(noted)

    def on_change(newcomers):
        assert survival.is_going_on
        raise KeyError(newcomers)

    with survival.calling(on_change), pytest.raises(KeyError):
        survival.go_on(PeerLostError("lost"), 4)
    assert noted.told == [("begin again", 4)]
    assert not survival.is_going_on
