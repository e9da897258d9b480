"""The ranks exchange what they are, signed with the job's secret, which comes from the user or from rank 0."""

from __future__ import annotations

import json
import os
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import attempt_threads

from hvdlite.errors import CommunicationError, LaunchEnvironmentError, MismatchError
from hvdlite.rendezvous.placement import Placement
from hvdlite.rendezvous.rank_info import (
    MAX_BYTES,
    RankInfo,
    agree_on_secret,
    exchange_rank_info,
    given_secret,
    new_secret,
    refuse,
)
from hvdlite.signing import Signer


def test_a_secret_is_read_from_the_variable_or_from_the_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert given_secret({"HVDLITE_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    assert given_secret({"HVDLITE_SECRET_FILE": str(file)}) == b"0123456789abcdef"
    assert given_secret({}) is None
    assert given_secret({"HVDLITE_SECRET": "", "HVDLITE_SECRET_FILE": ""}) is None


def test_what_protects_nothing_is_refused(tmp_path):
    readable, short, pipe = tmp_path / "readable", tmp_path / "short", tmp_path / "pipe"
    readable.write_text("0123456789abcdef")
    readable.chmod(0o640)
    short.write_text("1234")
    short.chmod(0o600)
    os.mkfifo(pipe, 0o600)
    for environ, words in [
        ({"HVDLITE_SECRET": "short"}, "HVDLITE_SECRET has 5 bytes, and needs at least 16"),
        ({"HVDLITE_SECRET_FILE": str(readable)}, f"chmod 600 {readable}"),
        ({"HVDLITE_SECRET_FILE": str(short)}, "has 4 bytes"),
        ({"HVDLITE_SECRET_FILE": str(pipe)}, "not a regular file"),
        ({"HVDLITE_SECRET_FILE": str(tmp_path / "none")}, "No such file"),
        ({"HVDLITE_SECRET": "x" * 16, "HVDLITE_SECRET_FILE": str(short)}, "both"),
    ]:
        with pytest.raises(LaunchEnvironmentError, match=words):
            given_secret(environ)


def test_a_new_secret_is_long_enough_and_new():
    assert given_secret({"HVDLITE_SECRET": new_secret()})
    assert new_secret() != new_secret()


SECRET = b"0123456789abcdef"
PATIENCE = timedelta(seconds=60)


def own(rank: int, size: int, version: str = "1") -> RankInfo:
    return RankInfo(Placement(rank, size, "node", f"host{rank}", rank), 100 + rank, version, {"check": True})


def meet(store: dist.Store, rank: int, size: int, secret: bytes = SECRET, version: str = "1"):
    return exchange_rank_info(store, own(rank, size, version), Signer(secret), PATIENCE)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_know_each_other_and_share_a_key_that_is_new_each_time(size):
    stores = dist.HashStore(), dist.HashStore()
    first, second = (attempt_threads(size, lambda rank, store=store: meet(store, rank, size)) for store in stores)
    for introductions, _ in first:
        assert [(each.placement.rank, each.placement.host, each.pid) for each in introductions] == [
            (rank, f"host{rank}", 100 + rank) for rank in range(size)
        ]
    keys = [{signer.sign("x") for _, signer in each} for each in (first, second)]
    assert [len(each) for each in keys] == [1, 1]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "garbage",
        "0" * 64 + json.dumps({"placement": {}}),
        "0" * 64 + "[" * 60000,
        "\x80\x04\x95" + "x" * 100,
        "\u0430" * 64 + "{}",
        "0" * (MAX_BYTES + 1),
    ],
)
def test_what_a_stranger_has_written_is_refused_by_name_of_the_rank(forged):
    store = dist.HashStore()
    store.set("introduction/1", forged)
    with pytest.raises(CommunicationError, match="the data received from rank 1 are not signed"):
        meet(store, 0, 2)


def test_an_introduction_cannot_be_given_by_another_rank():
    store = dist.HashStore()
    introduce_alone = attempt_threads(1, lambda rank: meet(store, 0, 1))
    assert introduce_alone[0][0][0].placement.rank == 0
    store.set("introduction/1", store.get("introduction/0"))
    with pytest.raises(CommunicationError, match="received from rank 1 are not signed"):
        meet(store, 0, 2)


def test_ranks_with_different_secrets_all_hear_of_it():
    store = dist.HashStore()
    outcomes = attempt_threads(2, lambda rank: meet(store, rank, 2, secret=SECRET + b"%d" % rank))
    assert all("HVDLITE_SECRET to the same value for every rank" in str(outcome) for outcome in outcomes)


def test_ranks_with_different_versions_are_told_which():
    store = dist.HashStore()
    outcomes = attempt_threads(2, lambda rank: meet(store, rank, 2, version=f"0.{rank}"))
    assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
    assert "version 0.0 on rank 0 (host0) and 0.1 on rank 1 (host1)" in str(outcomes[0])


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(CommunicationError, match=r"did not call it within 0\.05 s.*missing: rank 1, 2\."):
        exchange_rank_info(dist.HashStore(), own(0, 3), Signer(SECRET), timedelta(seconds=0.05))


class InterruptedStore(dist.HashStore):
    """A store in which Ctrl-C comes while it waits."""

    def wait(self, keys, timeout=None):
        raise KeyboardInterrupt


def test_ctrl_c_names_the_ranks_that_have_not_come():
    store = InterruptedStore()
    store.set("introduction/1", "here")
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted while waiting in hvd\.init\(\) for rank 2, 3$"):
        exchange_rank_info(store, own(0, 4), Signer(SECRET), timedelta(seconds=60))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_a_secret_of_the_users_rank_0_makes_one(size):
    store = dist.HashStore()
    outcomes = attempt_threads(size, lambda rank: agree_on_secret(store, rank, None))
    assert len(set(outcomes)) == 1
    assert len(outcomes[0]) >= 32


def test_a_given_secret_is_never_written_to_the_store():
    store = dist.HashStore()
    assert attempt_threads(2, lambda rank: agree_on_secret(store, rank, SECRET)) == [SECRET, SECRET]
    assert SECRET not in store.get("secret")


@pytest.mark.parametrize("has", [0, 1])
def test_a_secret_that_only_one_rank_has_is_an_error_there_and_nobody_waits_for_it(has):
    store = dist.HashStore()

    def attempt(rank: int):
        given = SECRET if rank == has else None
        try:
            secret = agree_on_secret(store, rank, given)
        except LaunchEnvironmentError:
            refuse(store, rank)
            raise
        return meet(store, rank, 2, secret=secret)

    first, second = attempt_threads(2, attempt)
    assert "the data received from rank 1 are not signed" in str(first)
    assert isinstance(second, LaunchEnvironmentError)
    assert "set it to the same value for every rank, or for none" in str(second)
