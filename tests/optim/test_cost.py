"""What averaging costs beside training: calls of Python functions per parameter and bucket, and bytes of memory."""

from __future__ import annotations

import collections
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from training import take_steps, wrap

import hvdlite as hvd
from hvdlite.buckets import parameter_check
from hvdlite.comm import torch_engine
from hvdlite.comm.flat_bytes import give_back_free_memory
from hvdlite.comm.group import Group
from hvdlite.optim import reducer

OPTIM = Path(parameter_check.__file__).parent


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the garbage collector nor a longer wait adds calls."""
    monkeypatch.setattr(torch_engine, "_LOOK", timedelta(seconds=60))
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def calls_of_one_step(group: Group, count: int, **options: Any) -> collections.Counter[str]:
    """Counts the calls of Python and C functions, from the first gradient to the last average."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(count)]
    optimizer = wrap(group, params, lr=0.1, **options)
    calls: collections.Counter[str] = collections.Counter()
    for step in range(3):
        optimizer.zero_grad()
        loss = torch.cat(params).sum()
        if step == 2:
            sys.setprofile(lambda frame, event, argument: calls.update(_kinds_of_call(frame, event)))
        loss.backward()
        optimizer.synchronize()
        sys.setprofile(None)
        optimizer.step()
    optimizer.close()
    return calls


def _kinds_of_call(frame: FrameType, event: str) -> list[str]:
    is_own = event == "call" and Path(frame.f_code.co_filename).parent == OPTIM
    return [event, "call of the optimizer"] if is_own else [event]


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_costs_two_calls_of_python_in_a_step_and_a_few_of_c(size):
    def rank(group: Group) -> tuple[collections.Counter[str], collections.Counter[str]]:
        # Beside each of the two there is another optimizer, for which a step can be taken back.
        beside = wrap(group, [nn.Parameter(torch.ones(4))], lr=0.1)
        few, many = calls_of_one_step(group, 100), calls_of_one_step(group, 300)
        beside.close()
        return few, many

    for few, many in run_ranks(size, rank):
        assert many["call"] - few["call"] <= 2 * 200
        # Each parameter: its state is looked up, its backward pass counted, its gradient scaled into the bucket, a lock
        # released.
        assert many["c_call"] - few["c_call"] <= 4 * 200


@pytest.mark.usefixtures("counted")
def test_a_bucket_costs_sixty_calls_of_the_optimizer_in_a_step_however_many_are_under_way():
    def rank(group: Group) -> list[collections.Counter[str]]:
        # Buckets of one parameter, with 16 bytes of gradients.
        return [calls_of_one_step(group, count, bucket_cap_mb=16 / 2**20) for count in (50, 150)]

    for few, many in run_ranks(2, rank):
        # What an engine does while it waits is not counted.
        assert many["call of the optimizer"] - few["call of the optimizer"] <= 60 * 100


class LiveBytes(TorchDispatchMode):
    """Records the most bytes of tensors that existed at one time, of those created within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


class CopyingEngine:
    """Reduces copies, and counts neither these nor what the engine allocates.

    Gloo's own threads keep a tensor for a moment after an operation.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        with _disable_current_modes():
            copies = [tensor.clone() for tensor in tensors]
            return CopiedWork(self._engine.allreduce(copies, opts), tensors, copies)


class CopiedWork:
    def __init__(self, work: Any, tensors: list[Tensor], copies: list[Tensor]) -> None:
        self._work, self._tensors, self._copies = work, tensors, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self) -> None:
        with _disable_current_modes():
            self._work.wait()
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            # Through .data, because engines in C++ change no version counter either.
            tensor.data.copy_(copy)
        self._tensors.clear()


WIDTH, LAYERS = 128, 8
LAYER_BYTES = 4 * WIDTH * WIDTH
# Losses, activations, and the flags at the ends of buckets.
SMALL_BYTES = LAYER_BYTES // 2


def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    take_steps(optimizer, lambda _: model(torch.ones(1, WIDTH)).sum(), range(3))


def make_model() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for param in model.parameters():
        # The same on all ranks, which share a random generator here.
        nn.init.constant_(param, 0.01)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_take_no_more_memory_than_without_averaging_and_wires_no_more_than_a_bucket(size, monkeypatch):
    # While parameters are compared, one chunk at a time.
    monkeypatch.setattr(parameter_check, "_CHUNK_WORDS", 512)
    buckets = {"bucket_cap_mb": 2 * LAYER_BYTES / 2**20}

    def rank(group: Group) -> None:
        with LiveBytes() as alone:
            model = make_model()
            train(torch.optim.SGD(model.parameters(), lr=0.1), model)
        assert alone.peak >= 2 * LAYERS * LAYER_BYTES
        peaks = []
        for options in ({}, {"compression": hvd.Compression.fp16}, {"step_on_arrival": True}):
            with LiveBytes() as together:
                model = make_model()
                train(wrap(group, model.parameters(), lr=0.1, **buckets, **options), model)
                peaks.append(together.peak - alone.peak)
                if "step_on_arrival" in options:
                    # No gradient is left, and no bucket.
                    assert together.now <= LAYERS * LAYER_BYTES + SMALL_BYTES
        # The gradient that autograd has made, while it is copied into its bucket.
        gradient = LAYER_BYTES if group.size > 1 else 0
        assert peaks[0] <= gradient + SMALL_BYTES
        assert peaks[1] <= LAYER_BYTES + 2 * LAYER_BYTES + SMALL_BYTES
        assert peaks[2] <= gradient + SMALL_BYTES

    run_ranks(size, rank, lambda: CopyingEngine)


class LateEngine:
    """The engine of a single rank: an all-reduce is done when it is waited for, and no sooner."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def allreduce(self, tensors: list[Tensor], options: Any) -> LateEngine:
        return self

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class CountingCompression:
    """Casts to fp16, and counts how many of its wires exist."""

    def __init__(self) -> None:
        self.alive = self.most = self.made = 0

    def compress(self, buffer: Tensor) -> Tensor:
        wire = buffer.half()
        self.made += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(wire, self._gone)
        return wire

    def _gone(self) -> None:
        self.alive -= 1

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(wire)

    def __repr__(self) -> str:
        return "counting"


def test_two_wires_at_most_are_there_however_slow_the_network_is():
    def rank(group: Group) -> tuple[int, int, int]:
        compression = CountingCompression()
        model = make_model()
        optimizer = wrap(group, model.parameters(), lr=0.1, compression=compression, bucket_cap_mb=1e-6)
        train(optimizer, model)
        return compression.made, compression.most, compression.alive

    assert run_ranks(1, rank, lambda: LateEngine) == [(3 * LAYERS, 2, 0)]


@pytest.mark.parametrize(("least", "expected"), [(1, [2]), (2**25, [])])
def test_the_memory_of_the_first_steps_gradients_is_given_back_once_if_it_is_much(least, expected, monkeypatch):
    here = threading.local()
    monkeypatch.setattr(reducer, "_MANY_BYTES", least)
    monkeypatch.setattr(reducer, "give_back_free_memory", lambda: here.given_back_in.append(here.step))

    def loss_of(param: Tensor, number: int) -> Tensor:
        here.step = number
        return param.sum()

    def rank(group: Group) -> list[int]:
        here.given_back_in = []
        param = nn.Parameter(torch.ones(4))
        take_steps(wrap(group, [param], lr=0.1), partial(loss_of, param), range(1, 5))
        return here.given_back_in

    assert run_ranks(2, rank) == [expected] * 2


def test_free_memory_goes_back_to_the_system():
    for _ in range(2):
        # The first ones are mapped by themselves; malloc keeps the second ones, below the one that is still used.
        tensors = [torch.ones(2**20) for _ in range(32)]
        last = tensors.pop()
        tensors.clear()
    before = resident_bytes()
    give_back_free_memory()
    assert before - resident_bytes() > 2**26
    assert last.sum() == 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_rank_that_consolidates_has_room_for_the_state_and_a_bucket_and_others_for_a_bucket():
    bucket_bytes = 2 * LAYER_BYTES

    def rank(group: Group) -> tuple[int, int]:
        model = make_model()
        optimizer = wrap(group, model, momentum=0.9, bucket_cap_mb=bucket_bytes / 2**20, shard="world")
        train(optimizer, model)
        own_bytes = sum(each["momentum_buffer"].nbytes for each in optimizer.state.values())
        measured = []
        # Gloo's own threads keep a tensor for a moment after an operation, now and then: they can only add to it.
        for _ in range(5):
            with LiveBytes() as live:
                optimizer.consolidate_state_dict(to=1)
                # This rank's own part was there before, and has been seen as it was read.
                stays = live.now - own_bytes
                measured.append((stays, live.peak - stays - own_bytes))
        return min(stays for stays, _ in measured), min(passing for _, passing in measured)

    outcomes = run_ranks(2, rank)
    for (stays, passing), expected_bytes in zip(outcomes, [0, LAYERS * LAYER_BYTES], strict=True):
        assert abs(stays - expected_bytes) <= SMALL_BYTES
        # A bucket's state in bytes of all ranks, and beside it the tensors that these become.
        assert passing <= 2 * bucket_bytes + SMALL_BYTES
