"""Autotune's measurements and their result, with engines of simulated speed on simulated clocks."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import Branches, MixedTypes, assert_same_training, batches, build, sgd, train_alone, train_rank
from ranks import CountingEngine, attempt_ranks, counting, run_ranks
from torch import nn
from training import take_steps, wrap
from worlds import PLAIN, run_generations, run_worlds

import hvdlite as hvd
from hvdlite.buckets.plan import ParamSpec
from hvdlite.buckets.settings import Settings
from hvdlite.comm.engine import SingleRankEngine
from hvdlite.comm.group import Group
from hvdlite.environment import Environment
from hvdlite.optim import autotune
from hvdlite.optim import optimizer as optimizer_module
from hvdlite.optim.autotune import SIZES, GradientType, TimeModel, candidates, fit, measure, tuned_cap

KIB = 2**10
DEFAULT = 16 * 2**20


class Clock:
    """A clock that only an engine advances; ``rate`` is how fast it goes then."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.now = 1000.0 * rate

    def __call__(self) -> float:
        return self.now


class PacedEngine(CountingEngine):
    """Takes a line's time for gradients, by the rank's clock, without sending them; it sends all else."""

    def __init__(self, engine: Any, line: TimeModel, clock: Clock) -> None:
        super().__init__(engine, [])
        self._line, self._clock = line, clock

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        (wire,) = tensors
        if wire.dtype == torch.float64:
            return super().allreduce(tensors, opts)
        self.calls.append(("gradients", wire.numel()))
        self._clock.now += self._clock.rate * self._line.time_s(wire.nbytes)
        return SingleRankEngine().allreduce(tensors, opts)


def run_paced(size: int, line: TimeModel, function: Callable[[Group, Clock], Any]) -> list[Any]:
    """Runs ``function`` on ranks whose engines take the line's time; rank r's clock goes r + 1 times as fast."""

    def make_wrapper() -> Callable[[Any], Any]:
        clock = Clock(1.0)
        return lambda engine: PacedEngine(engine, line, clock)

    def rank(group: Group) -> Any:
        clock = group.engine._clock  # type: ignore[attr-defined]  # a PacedEngine
        clock.rate = group.rank + 1.0
        return function(group, clock)

    return run_ranks(size, rank, make_wrapper)


def settings(compression: Any = hvd.Compression.none) -> Settings:
    return Settings(compression, hvd.Average, 1.0, DEFAULT, sparse_as_dense=False)


def weights(count: int, numel: int) -> list[tuple[str, nn.Parameter]]:
    return [(f"w{i}", nn.Parameter(torch.zeros(numel))) for i in range(count)]


def cap_of(optimizer: hvd.DistributedOptimizer) -> int:
    # Like the first step.
    optimizer._reducer.connect()
    return optimizer._reducer.settings.cap_bytes


@pytest.mark.parametrize(("line", "buckets"), [(TimeModel(2e-3, 1e-9), 1), (TimeModel(1e-6, 1e-8), 8)])
def test_all_ranks_take_the_cap_that_suits_the_slowest_though_their_clocks_differ(line, buckets):
    named = weights(8, 16 * KIB)

    def rank(group: Group, clock: Clock) -> tuple[int, int]:
        cap = tuned_cap(group, settings(), named, [], path=None, clock=clock)
        return cap, len(group.engine.calls)

    outcomes = run_paced(3, line, rank)
    slowest = TimeModel(3 * line.alpha_s, 3 * line.beta_s)
    specs = [ParamSpec.of(name, param) for name, param in named]
    expected = min(candidates(specs, [], {GradientType("cpu", "float32"): slowest}))
    assert expected.buckets == buckets
    assert [cap for cap, _ in outcomes] == [expected.cap_bytes] * 3
    assert len({calls for _, calls in outcomes}) == 1


def test_a_probe_finds_what_the_engine_takes_for_the_wire_that_travels():
    like, line = ParamSpec.of("w", torch.zeros(1)), TimeModel(1e-3, 1e-9)

    def rank(group: Group, clock: Clock) -> list[TimeModel]:
        found = []
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            measured = measure(group, settings(compression), like, most_bytes=2**20, limit_s=1.0, clock=clock)
            assert len(measured) == sum(nbytes <= 2**20 for nbytes in SIZES)
            found.append(fit(measured))
        return found

    # The second rank's clock goes twice as fast.
    for whole, half in run_paced(2, line, rank):
        assert (whole.alpha_s, whole.beta_s) == (pytest.approx(2e-3), pytest.approx(2e-9))
        assert (half.alpha_s, half.beta_s) == (pytest.approx(2e-3), pytest.approx(1e-9))


def test_on_a_slow_link_large_sizes_are_left_out_and_two_are_always_measured():
    like = ParamSpec.of("w", torch.zeros(1))

    def rank(group: Group, clock: Clock) -> tuple[int, float]:
        begin_s = clock()
        measured = measure(group, settings(), like, most_bytes=2**30, limit_s=1.0, clock=clock)
        return len(measured), (clock() - begin_s) / clock.rate

    # 1 MB/s: the next size would take a second each time it is sent.
    for sizes, took_s in run_paced(2, TimeModel(1e-3, 1e-6), rank):
        assert sizes == 2
        assert took_s < 1.0
    # Ten seconds each: with as few measurements as a median needs.
    assert [took_s for _, took_s in run_paced(2, TimeModel(10.0, 0.0), rank)] == [90.0, 90.0]


@pytest.mark.parametrize("kind", [Branches, MixedTypes])
def test_training_with_a_measured_size_matches_one_process_on_the_whole_batch(kind):
    model, (x, y) = build(kind), batches(1, 1, 8)
    reference = train_alone(model, sgd, x, y, 2)
    outcomes = run_ranks(2, lambda group: train_rank(group, model, sgd, x, y, autotune=True))
    assert_same_training(outcomes, reference)


def test_what_was_measured_is_in_the_file_and_what_was_chosen_in_rank_0s_log(tmp_path, caplog, monkeypatch):
    # Time for all sizes, however busy the machine is.
    monkeypatch.setattr(autotune, "LIMIT_S", 600.0)
    path = tmp_path / "autotune.jsonl"

    def rank(_: int) -> list[int]:
        named = [*weights(1, 100_000), ("wide", nn.Parameter(torch.zeros(10, dtype=torch.float64)))]
        optimizer = torch.optim.SGD([param for _, param in named], lr=1.0)
        return [
            cap_of(hvd.DistributedOptimizer(optimizer, named, compression=each, autotune=True))
            for each in (hvd.Compression.none, hvd.Compression.fp16)
        ]

    with caplog.at_level(logging.INFO, "hvdlite"):
        caps, others = run_worlds(2, rank, Environment(stall_check=False, autotune_log=str(path)))
    assert caps == others
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["ranks"], first["compression"], first["cap_bytes"]) == (2, "Compression.none", caps[0])
    assert (second["compression"], second["cap_bytes"]) == ("Compression.fp16", caps[1])
    assert {(each["device_type"], each["dtype"]): len(each["bytes"]) for each in first["engines"]} == {
        ("cpu", "float32"): 3,
        ("cpu", "float64"): 2,
    }
    for each in first["engines"]:
        line = fit(dict(zip(each["bytes"], each["medians_s"], strict=True)))
        assert (each["alpha_s"], each["beta_s_per_byte"]) == (line.alpha_s, line.beta_s)
    steps = {each["cap_bytes"]: each["step_s"] for each in first["candidates"]}
    assert steps[caps[0]] == min(steps.values())
    told = [record.message for record in caplog.records if "autotune: buckets of at most" in record.message]
    assert len(told) == 2
    assert f"at most {caps[0] / 2**20:g} MiB" in told[0]
    assert "cpu float32: " in told[0]


def test_a_rank_alone_has_the_default_and_says_so(caplog):
    with caplog.at_level(logging.INFO, "hvdlite"):
        assert run_ranks(1, lambda group: cap_of(wrap(group, [nn.Parameter(torch.zeros(2))], autotune=True))) == [
            DEFAULT
        ]
    assert [record.message for record in caplog.records] == [
        "autotune: a single rank has nothing to measure: buckets of at most 16 MiB"
    ]


def test_a_file_that_cannot_be_written_is_one_error_on_all_ranks_in_the_first_step(tmp_path):
    path = tmp_path / "nowhere" / "autotune.jsonl"
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]

    def rank(number: int) -> str:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([params[number]], lr=1.0), autotune=True)
        with pytest.raises(OSError, match="the log of autotune cannot be written on rank 0") as caught:
            optimizer.step()
        optimizer.close()
        return str(caught.value)

    outcomes = run_worlds(2, rank, Environment(stall_check=False, autotune_log=str(path)))
    assert outcomes[0] == outcomes[1]
    assert str(path.parent) in outcomes[0]
    assert not any(param._post_accumulate_grad_hooks for param in params)


def test_models_that_differ_are_found_before_anything_is_measured():
    def rank(group: Group) -> None:
        wrap(group, [nn.Parameter(torch.zeros(2 + group.rank))], autotune=True).step()

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "shape (2,)" in str(outcome)


def test_a_size_in_the_environment_contradicts_the_argument():
    def rank(_: int) -> None:
        with pytest.raises(
            ValueError, match=r"autotune=True: HVDLITE_FUSION_THRESHOLD=4096 already sets .* leave out one"
        ):
            hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0), autotune=True)

    run_worlds(1, rank, Environment(stall_check=False, fusion_threshold_bytes=4096))


def test_the_environment_asks_for_every_optimizer_and_yields_to_what_one_of_them_says(caplog):
    def rank(_: int) -> list[int]:
        def cap(**options: Any) -> int:
            params = [nn.Parameter(torch.zeros(2))]
            return cap_of(hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options))

        return [cap(), cap(bucket_cap_mb=8), cap(op=hvd.Adasum)]

    with caplog.at_level(logging.INFO, "hvdlite"):
        for caps in run_worlds(2, rank, Environment(stall_check=False, autotune=True)):
            assert caps == [64 * KIB, 8 * 2**20, DEFAULT]
    told = [record.message for record in caplog.records if "has no effect on this optimizer" in record.message]
    assert sorted(told)[::2] == [
        "HVDLITE_AUTOTUNE=1 has no effect on this optimizer: bucket_cap_mb=8 already sets the size of the buckets: "
        "leave out one of the two",
        "HVDLITE_AUTOTUNE=1 has no effect on this optimizer: with op=hvd.Adasum nothing is sent during backward, so "
        "the size of the buckets makes no difference",
    ]


def test_parameters_that_are_added_have_the_same_cap_and_nothing_more_is_measured():
    def rank(group: Group) -> tuple[int, list[int]]:
        optimizer = wrap(group, [nn.Parameter(torch.zeros(2))], autotune=True)
        optimizer._reducer.connect()
        group.engine.calls.clear()
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(12 * KIB)) for _ in range(2)]})
        reductions = [name for name, _ in group.engine.calls if name == "allreduce"]
        return len(reductions), [len(bucket.states) for bucket in optimizer._reducer.step.plan.layout.buckets]

    # A cap of 64 KiB: 48 KiB each.
    assert run_ranks(2, rank, counting) == [(0, [1, 1, 1])] * 2


def test_a_pickled_optimizer_keeps_the_cap_and_measures_nothing():
    def rank(_: int) -> tuple[int, int]:
        params = [nn.Parameter(torch.zeros(2))]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), autotune=True)
        optimizer.step()
        again = pickle.loads(pickle.dumps(optimizer))
        # No other rank would take part in a measurement: it returns because none is made.
        return cap_of(optimizer), again._reducer.settings.cap_bytes

    assert run_worlds(2, rank, PLAIN) == [(64 * KIB, 64 * KIB)] * 2


@pytest.mark.parametrize(("sizes", "measured"), [([2, 2], [1, 1, 0]), ([2, 3, 3], [2, 2, 1]), ([1, 2, 2], [2, 1, 0])])
def test_what_was_measured_is_kept_in_another_world_of_the_same_ranks_and_measured_anew_where_some_are_new(
    sizes, measured, monkeypatch
):
    counts = [0, 0, 0]
    tuned = optimizer_module.tuned_cap

    def count(group: Group, *arguments: Any, **more: Any) -> int:
        counts[group.rank] += 1
        tuned(group, *arguments, **more)
        # The cap of a single rank differs from that of several ranks.
        return group.size * 64 * KIB

    monkeypatch.setattr(optimizer_module, "tuned_cap", count)

    def rank(generations: Iterator[int]) -> list[int]:
        optimizer, caps = None, []
        param = nn.Parameter(torch.zeros(2))
        for _ in generations:
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), autotune=True)
            take_steps(optimizer, lambda _: param.sum(), range(2))
            with torch.no_grad():
                param.zero_()
            caps.append(cap_of(optimizer))
        return caps

    caps = run_generations(sizes, rank)
    assert caps[0] == [size * 64 * KIB for size in sizes]
    assert counts[: len(caps)] == measured[: len(caps)]
