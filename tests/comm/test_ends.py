"""How waits for ranks that have ended, or have failed, end while an engine opens."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from ranks import attempt_threads

from hvdlite.comm.gloo import Connecting, ConnectingRanks, InitTimeout
from hvdlite.comm.torch_engine import TorchEngineFactory
from hvdlite.comm.work import Ends
from hvdlite.errors import CommunicationError, MismatchError, PeerLostError
from hvdlite.shm.setup import ShmEngineFactory
from hvdlite.signing import Signer

# The tests would last as long if a wait were not ended.
LONG = timedelta(seconds=3000)


def factories(size: int) -> list[tuple[Ends, Callable[[str], Any]]]:
    """Returns each rank's ends, and what makes its factory of engines of a kind."""
    store = dist.HashStore()
    made = []
    for rank in range(size):
        ends = Ends()
        ends.give_up_connecting = Connecting(size).give_up_begun
        names = tuple(f"rank {each} (here)" for each in range(size))
        ranks = ConnectingRanks(store, Signer(b"key"), rank, names, InitTimeout(LONG), ends)
        torchs = TorchEngineFactory("gloo", ranks)
        kinds = {"gloo": torchs, "shared memory": ShmEngineFactory(ranks, torchs, for_gpus=False)}
        made.append((ends, kinds.__getitem__))
    return made


def tell_others(of_ranks: list[tuple[Ends, Callable[[str], Any]]], own: int) -> Callable[[str, int, str], None]:
    """Returns what rank 0 does with a failure, without a network."""

    def tell(label: str, number: int, words: str) -> None:
        for rank, (ends, _) in enumerate(of_ranks):
            if rank != own:
                ends.record_failure(own, label, number, words)

    return tell


def fail(*_: object, **__: object) -> Any:
    raise MemoryError("none left")


@pytest.mark.parametrize("failing", ["before", "wait_for_all", "_make_device", "_prove", "_make_own", "_make_context"])
def test_what_a_rank_fails_with_while_it_opens_its_part_ends_the_waits_of_all(failing, monkeypatch):
    from hvdlite.comm import gloo, gloo_sockets, torch_engine  # noqa: PLC0415  # patched here alone
    from hvdlite.shm import setup  # noqa: PLC0415

    of_ranks = factories(3)
    kind = "shared memory" if failing in ("_make_own", "_make_context") else "gloo"
    for module in (torch_engine, gloo, gloo_sockets, setup):
        original = getattr(module, failing, None)
        if original is not None:
            monkeypatch.setattr(module, failing, _on_rank_1(original))

    def run(rank: int) -> Any:
        threading.current_thread().name = f"rank {rank}"
        ends, factory = of_ranks[rank]
        ends.say_failed = tell_others(of_ranks, rank)
        opens = factory(kind).open
        return ends.run("all", fail if failing == "before" and rank == 1 else opens)

    first, second, third = attempt_threads(3, run)
    assert isinstance(second, MemoryError)
    for told in (first, third):
        assert isinstance(told, CommunicationError)
        assert "rank 1 (here) has failed to open its part: MemoryError: none left" in str(told)


def _on_rank_1(original: Callable[..., Any]) -> Callable[..., Any]:
    def instead(*arguments: Any, **named: Any) -> Any:
        failing = threading.current_thread().name == "rank 1"
        return (fail if failing else original)(*arguments, **named)

    return instead


@pytest.mark.parametrize("kind", ["gloo", "shared memory"])
@pytest.mark.parametrize("ended_normally", [True, False])
def test_the_end_of_a_rank_ends_the_waits_for_it(kind, ended_normally):
    of_ranks = factories(3)

    def run(rank: int) -> Any:
        if rank == 1:
            for ends, _ in of_ranks:
                ends.record_end(1, ended_normally)
            return None
        return of_ranks[rank][1](kind).open()

    first, _, third = attempt_threads(3, run)
    for told in (first, third):
        assert type(told) is (CommunicationError if ended_normally else PeerLostError)
        assert "rank 1 (here) has" in str(told)


def test_the_end_of_a_rank_that_is_not_among_them_leaves_the_others_alone():
    of_ranks = factories(3)

    def run(rank: int) -> Any:
        of_ranks[rank][0].record_end(1, ended_normally=False)
        if rank == 1:
            return None
        factory = of_ranks[rank][1]("gloo").among([0, 2], [0, None, 1][rank], "some")
        engine = factory.open()
        engine.close()
        return "opened"

    assert attempt_threads(3, run) == ["opened", None, "opened"]


def test_a_failure_ends_no_wait_of_another_operation():
    ends, said = Ends(), []
    ends.say_failed = lambda label, number, words: said.append((label, number, words))
    with pytest.raises(MemoryError):
        ends.run("all", fail)
    assert said == [("all", 1, "MemoryError: none left")]
    with pytest.raises(MismatchError):
        ends.run("all", _differ)
    assert len(said) == 1, "what every rank raises is told to nobody"

    store = dist.HashStore()

    def wait() -> None:
        ends.record_failure(1, "all", 2, "of an earlier one")
        ends.record_failure(1, "other", 3, "of others")
        store.set("key", "1")
        ends.wait_until_set(store, ["key"], LONG, [0, 1], ["a", "b"])
        ends.record_failure(1, "all", 3, "of this one")
        ends.wait_until_set(store, ["another"], LONG, [0, 1], ["a", "b"])

    with pytest.raises(CommunicationError, match=r"^b has failed to open its part: of this one$"):
        ends.run("all", wait)


def test_what_a_process_has_run_out_of_is_told_though_its_error_is_one_of_the_librarys_own():
    ends, said = Ends(), []
    ends.say_failed = lambda label, number, words: said.append(words)
    with pytest.raises(CommunicationError):
        ends.run("all", _lack_files)
    (words,) = said
    assert words.startswith("this process has too many open files")


def _lack_files() -> None:
    raise CommunicationError("could not connect") from OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _differ() -> None:
    raise MismatchError("they differ")


def test_a_store_that_is_gone_fails_at_once_and_a_timeout_is_the_store_s_own():
    class Gone(dist.Store):
        asked = 0

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            self.asked += 1
            raise RuntimeError("gone")

    store = Gone()
    with pytest.raises(RuntimeError, match="gone"):
        Ends().wait_until_set(store, ["key"], LONG, [0, 1], ["a", "b"])
    assert store.asked == 1
    with pytest.raises(RuntimeError):
        Ends().wait_until_set(dist.HashStore(), ["key"], timedelta(seconds=0.01), [0, 1], ["a", "b"])
