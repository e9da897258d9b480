"""What a rank sends of its own reaches the others with a signature, which is checked before it is believed."""

from __future__ import annotations

import pickle

import pytest
import torch
from ranks import attempt_ranks, run_ranks

from hvdlite.collectives.replicate import allgather_object, broadcast_object
from hvdlite.errors import CommunicationError


class Tampering:
    """A rank's engine that changes what it sends: the n-th byte of every all-gather or broadcast of that size."""

    def __init__(self, engine, rank_tampers, place, least_bytes):
        self._engine, self._rank_tampers, self._place, self._least_bytes = engine, rank_tampers, place, least_bytes

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def _changed(self, tensor):
        if self._rank_tampers() and tensor.dtype == torch.uint8 and tensor.numel() >= self._least_bytes:
            tensor = tensor.clone()
            tensor[self._place] ^= 1
        return tensor

    def allgather(self, outputs, inputs):
        return self._engine.allgather(outputs, [self._changed(inputs[0])])

    def broadcast(self, tensors, options):
        return self._engine.broadcast([self._changed(tensors[0])], options)


def tampered(function, *, place, least_bytes):
    """What becomes of ``function`` on two ranks, the second of which sends other bytes than it has signed."""
    import threading  # noqa: PLC0415

    tampers = threading.local()

    def run(group):
        tampers.here = group.rank == 1
        return function(group)

    return attempt_ranks(
        2, run, lambda: lambda engine: Tampering(engine, lambda: getattr(tampers, "here", False), place, least_bytes)
    )


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
    data = b"d" * 100
    outcome, _ = tampered(lambda group: group.all_gather_signed(data, "test"), place=place, least_bytes=least_bytes)
    assert isinstance(outcome, CommunicationError)
    assert "in the name of rank 1 (node1) is not signed" in str(outcome)


def test_what_was_signed_for_an_earlier_call_does_not_count():
    recorded = {}

    def run(group):
        sign = group._sign_header

        def replaying(data, place, what):
            return recorded.setdefault(group.rank, sign(data, place, what))

        if group.rank == 1:
            group._sign_header = replaying
        return [group.all_gather_signed(b"same", "test") for _ in range(2)]

    outcome, _ = attempt_ranks(2, run)
    assert "in the name of rank 1 (node1) is not signed" in str(outcome)


def test_more_json_than_there_may_be_is_refused_on_all_ranks(monkeypatch):
    monkeypatch.setattr("hvdlite.channels.collective.MAX_JSON_BYTES", 10)
    outcomes = attempt_ranks(2, lambda group: group.all_gather_json("long" * group.rank * 10, "test"))
    assert all("rank 1 (node1) has 42 bytes to tell, more than the 10" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("share", [allgather_object, lambda obj, **where: broadcast_object(obj, 1, **where)])
def test_an_object_that_was_exchanged_on_its_way_is_never_unpickled(share, tmp_path, monkeypatch):
    from ranks import set_of  # noqa: PLC0415

    loaded = []
    monkeypatch.setattr(pickle, "loads", loaded.append)
    monkeypatch.setattr("hvdlite.collectives.replicate.pickle.loads", loaded.append)
    obj = {"model": "x" * 200}
    outcome, _ = tampered(lambda group: share(obj, process_set=set_of(group)), place=30, least_bytes=150)
    assert "is not signed" in str(outcome)
    assert loaded == [] or all(pickle.dumps(obj) == data for data in loaded)
