"""The line fitted to measured times, and the bucket size that follows from it: no ranks, no clock."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.buckets.plan import ParamSpec, plan_buckets
from hvdlite.optim.autotune import (
    SIZES,
    SMALLEST_CAP_BYTES,
    Candidate,
    GradientType,
    TimeModel,
    candidates,
    fit,
    step_s,
)

KIB = 2**10
CPU32 = GradientType("cpu", "float32")
latencies = st.floats(1e-6, 1e-2)
# Seconds per byte: from 100 GB/s to 10 MB/s.
paces = st.floats(1e-11, 1e-7)


def spec(name: str, kib: float, *, dtype: torch.dtype = torch.float32, trainable: bool = True) -> ParamSpec:
    shape = (int(kib * KIB) // dtype.itemsize,)
    return ParamSpec(name, shape, (1,), dtype, torch.device("cpu"), trainable)


def chosen(specs: list[ParamSpec], line: TimeModel) -> Candidate:
    return min(candidates(specs, [], {CPU32: line}))


@given(latencies, paces)
def test_what_lies_on_a_line_gives_that_line(alpha_s, beta_s):
    line = fit({nbytes: alpha_s + beta_s * nbytes for nbytes in SIZES})
    for nbytes in (1, *SIZES, 10**9):
        assert line.time_s(nbytes) == pytest.approx(alpha_s + beta_s * nbytes, rel=1e-3)


# The same examples in every run: some noise, if chosen on purpose, hides a small latency from any fit.
@settings(derandomize=True)
@given(latencies, paces, st.lists(st.floats(0.95, 1.05), min_size=6, max_size=6), st.sampled_from(SIZES))
def test_a_line_is_found_under_noise_though_at_one_size_something_else_took_the_machine(
    alpha_s, beta_s, noise, disturbed
):
    times_s = {
        nbytes: (alpha_s + beta_s * nbytes) * factor * (10 if nbytes == disturbed else 1)
        for nbytes, factor in zip(SIZES, noise, strict=True)
    }
    line = fit(times_s)
    for nbytes in SIZES:
        if nbytes != disturbed:
            assert line.time_s(nbytes) == pytest.approx(alpha_s + beta_s * nbytes, rel=0.25)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=6))
def test_nothing_that_is_measured_makes_a_latency_or_a_pace_negative(times_s):
    line = fit(dict(zip(SIZES, times_s, strict=False)))
    assert line.alpha_s >= 0
    assert line.beta_s >= 0


def test_without_latency_buckets_are_small_and_without_a_limit_of_bandwidth_there_is_one():
    specs = [spec(f"p{i}", 64) for i in range(32)]
    assert chosen(specs, TimeModel(0.0, 1e-9)) == Candidate(
        step_s=pytest.approx(2**21 * 1e-9, rel=0.1), buckets=32, cap_bytes=SMALLEST_CAP_BYTES
    )
    one = chosen(specs, TimeModel(1e-3, 0.0))
    assert (one.buckets, one.step_s) == (1, 1e-3)
    assert one.cap_bytes == 32 * 64 * KIB


@given(st.lists(st.floats(0.1, 600), min_size=1, max_size=30), latencies, paces)
def test_a_longer_latency_never_shortens_the_chosen_step(sizes_kib, alpha_s, beta_s):
    specs = [spec(f"p{i}", kib) for i, kib in enumerate(sizes_kib)]
    assert chosen(specs, TimeModel(10 * alpha_s, beta_s)).step_s >= chosen(specs, TimeModel(alpha_s, beta_s)).step_s


def test_the_longer_the_latency_the_fewer_the_buckets():
    specs = [spec(f"p{i}", 64) for i in range(64)]
    buckets = [chosen(specs, TimeModel(alpha_s, 1e-9)).buckets for alpha_s in (0.0, 1e-5, 1e-4, 1e-3, 1e-1)]
    assert buckets == sorted(buckets, reverse=True)
    assert buckets[0] > buckets[2] > buckets[-1]


def test_a_step_is_as_long_as_its_buckets_make_it_one_after_the_other():
    # At 100 ns per byte, and with a backward as long as sending all bytes: 96 KiB.
    line, ms_of_kib = TimeModel(1.0, 1e-7), 1024e-7
    specs = [spec("first", 32), spec("second", 32), spec("third", 32)]
    plans = plan_buckets(specs, cap_bytes=32 * KIB)
    tail_s = 1e-7 * (plans[0].nbytes - 32 * KIB)
    # Each bucket waits for the one before: the latency is longer than backward.
    expected = 32 * ms_of_kib + 3 * (1.0 + 32 * ms_of_kib + tail_s)
    assert step_s(specs, plans, {CPU32: line}) == pytest.approx(expected)
    # Without latency, each bucket is done before the next is ready.
    expected = 96 * ms_of_kib + (32 * ms_of_kib + tail_s)
    assert step_s(specs, plans, {CPU32: TimeModel(0.0, 1e-7)}) == pytest.approx(expected, rel=1e-3)


def test_each_bucket_takes_what_its_own_engine_needs_and_frozen_ones_nothing():
    specs = [spec("wide", 64, dtype=torch.float64), spec("frozen", 64, trainable=False), spec("plain", 64)]
    plans = [plan for plan in plan_buckets(specs, cap_bytes=0) if not plan.is_frozen]
    line_of = {CPU32: TimeModel(1.0, 0.0), GradientType("cpu", "float64"): TimeModel(10.0, 0.0)}
    assert step_s(specs, plans, line_of) == 11.0


def test_parameters_of_a_group_stay_together_whatever_the_cap():
    specs = [spec(f"p{i}", 64) for i in range(8)]
    groups = [[each.name for each in specs]]
    assert {each.buckets for each in candidates(specs, groups, {CPU32: TimeModel(0.0, 1e-9)})} == {1}


def test_parameters_without_elements_have_a_cap_too():
    empty = ParamSpec("empty", (0,), (1,), torch.float32, torch.device("cpu"), trainable=True)
    assert chosen([empty], TimeModel(1e-3, 1e-9)).cap_bytes == SMALLEST_CAP_BYTES
