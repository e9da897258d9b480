"""Data that a rank sends about itself is signed, and other ranks check the signature before they use it."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from ranks import attempt_ranks, run_ranks
from worlds import attempt_worlds

from hvdlite.errors import CommunicationError
from hvdlite.ops.api import barrier
from hvdlite.ops.broadcast import allgather_object, broadcast_object


class Tampering:
    """An engine by which the second rank, once ``is_on``, sends data in which one bit is changed."""

    def __init__(self, engine, is_on, place, least_bytes):
        self._engine, self._is_on, self._place, self._least_bytes = engine, is_on, place, least_bytes

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def _changed(self, tensor):
        tampers = self._is_on.is_set() and self._engine.process_group.rank() == 1
        if tampers and tensor.dtype == torch.uint8 and tensor.numel() >= self._least_bytes:
            tensor = tensor.clone()
            tensor[self._place] ^= 1
        return tensor

    def allgather(self, outputs, inputs):
        return self._engine.allgather(outputs, [self._changed(inputs[0])])

    def broadcast(self, tensors, options):
        return self._engine.broadcast([self._changed(tensors[0])], options)


def tampering(*, place, least_bytes, is_on):
    """Makes the wrapper of each of a rank's engines, for `attempt_ranks`."""
    return lambda: lambda engine: Tampering(engine, is_on, place, least_bytes)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bytes_of_any_length_reach_all_ranks(size):
    data = [b"", b"x", bytes(range(256)) * 300][:size]
    assert run_ranks(size, lambda group: group.all_gather_signed(data[group.rank], "test")) == [data] * size
    for root in range(size):
        sent = run_ranks(
            size,
            lambda group, root=root: group.broadcast_signed(data[root] if group.rank == root else None, root, "test"),
        )
        assert sent == [data[root]] * size


@pytest.mark.parametrize(("place", "least_bytes"), [(0, 72), (7, 72), (20, 72), (71, 72), (5, 100)])
def test_what_is_changed_on_its_way_is_refused_with_the_rank_whose_it_was_to_be(place, least_bytes):
    is_on = threading.Event()
    is_on.set()
    outcome, _ = attempt_ranks(
        2,
        lambda group: group.all_gather_signed(b"d" * 100, "test"),
        tampering(place=place, least_bytes=least_bytes, is_on=is_on),
    )
    assert isinstance(outcome, CommunicationError)
    assert "the data received from rank 1 (node1) are not signed" in str(outcome)


def test_what_was_signed_for_an_earlier_call_does_not_count():
    recorded = {}

    def run(group):
        signed_call = group._signed_call

        def replaying(what):
            call = signed_call(what)
            header = call.header
            call.header = lambda data, rank: recorded.setdefault(group.rank, header(data, rank))
            return call

        if group.rank == 1:
            group._signed_call = replaying
        return [group.all_gather_signed(b"same", "test") for _ in range(2)]

    outcome, _ = attempt_ranks(2, run)
    assert "the data received from rank 1 (node1) are not signed" in str(outcome)


def test_more_json_than_there_may_be_is_refused_on_all_ranks(monkeypatch):
    monkeypatch.setattr("hvdlite.comm.group.MAX_JSON_BYTES", 10)
    outcomes = attempt_ranks(2, lambda group: group.all_gather_json("long" * group.rank * 10, "test"))
    assert all("rank 1 (node1) sends 42 bytes, more than the limit of 10" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("share", [allgather_object, lambda obj: broadcast_object(obj, 1)])
def test_an_object_that_was_exchanged_on_its_way_is_never_unpickled(share, monkeypatch):
    loaded = []
    monkeypatch.setattr("hvdlite.ops.broadcast.pickle.loads", loaded.append)
    obj, is_on = {"model": "x" * 200}, threading.Event()

    def rank(_own):
        barrier()
        is_on.set()
        return share(obj)

    outcome, _ = attempt_worlds(2, rank, make_wrapper=tampering(place=30, least_bytes=150, is_on=is_on))
    assert "are not signed" in str(outcome)
    # Rank 1 may have received its own data.
    assert all(pickle.dumps(obj) == data for data in loaded)
