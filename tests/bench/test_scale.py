"""The latency-bandwidth model gives the values that were computed by hand."""

from __future__ import annotations

import json

import pytest

from hvdlite.bench.ranks import Job
from hvdlite.bench.scale import Calibration, Link, Parts, Scale, StepModel, fit, read_calibration, report_of

RUN = Calibration(
    setting=Job(2, 1, "shared memory"),
    model="mlp",
    batch=16,
    compression="none",
    points=((1000, 3e-3), (1_000_000, 4e-3)),
    parts=Parts(0.1, 0.2, 0.05),
    bucket_bytes=(1_000_000, 2_000_000),
    measured_step_s=0.4,
)


def test_a_ring_costs_twice_its_neighbours_in_latency_and_nearly_twice_the_bytes():
    # 2 × 3 × 1 ms, and 2 × 3/4 of 8 MB at 1 ns a byte.
    assert Link(1e-3, 1e-9).all_reduce_s(4, 8_000_000) == pytest.approx(6e-3 + 12e-3)
    assert Link(1e-3, 1e-9).all_reduce_s(1, 8_000_000) == 0


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_fit_finds_the_link_that_made_the_times(ranks):
    link = Link(2e-5, 3e-10)
    found = fit({nbytes: link.all_reduce_s(ranks, nbytes) for nbytes in (1000, 60_000, 4_000_000)}, ranks)
    assert found.alpha_s == pytest.approx(link.alpha_s)
    assert found.beta_s == pytest.approx(link.beta_s)


def test_the_fit_never_goes_below_nothing():
    assert fit({1000: 1e-6, 1_000_000: 2e-3}, 2).alpha_s == 0
    assert fit({1000: 2e-3, 1_000_000: 1e-3}, 2).beta_s == 0
    only = fit({1000: 2e-3}, 2)
    assert (only.alpha_s, only.beta_s) == (pytest.approx(1e-3), 0.0)


def test_buckets_travel_one_after_the_other_from_when_they_are_full():
    # Two ranks, no latency, 0.01 s a byte: 1 s and 3 s. The first is full at 1 + 4 / 4 = 2 and averaged at 3, the
    # second is full at 5 and averaged at 8; the update takes half a second more.
    step = StepModel(Parts(1.0, 4.0, 0.5), (100, 300), Link(0.0, 0.01))
    assert step.step_s(2) == pytest.approx(8.5)
    assert step.predict(2)["efficiency"] == pytest.approx(5.5 / 8.5)


def test_what_fits_beside_backward_but_for_the_last_bucket_costs_only_that():
    parts, buckets = Parts(1.0, 4.0, 0.5), (300, 100)
    assert StepModel(parts, buckets, Link(0.0, 1e-3)).step_s(2) == pytest.approx(5.5 + 0.1)
    assert StepModel(parts, buckets, Link(1.0, 1.0)).step_s(1) == pytest.approx(5.5)


def test_it_stops_paying_where_one_rank_more_adds_too_little():
    # A second of backward, one bucket, 0.05 s a message: n ranks are worth n / (0.9 + 0.1 n) of one, and one more adds
    # 0.9 / ((0.9 + 0.1 n) (1 + 0.1 n)): 0.577 at three, 0.495 at four.
    parts = Parts(0.0, 1.0, 0.0)
    step = StepModel(parts, (1,), Link(0.05, 0.0))
    assert step.throughput(11) == pytest.approx(11 / 2)
    assert step.predict(4)["added"] == pytest.approx(0.9 / (1.3 * 1.4))
    assert step.stops_paying_at(0.5) == 4
    assert step.stops_paying_at(0.9) == 1
    assert StepModel(parts, (1,), Link(0.0, 0.0)).stops_paying_at(0.5) is None


def test_a_calibration_is_read_as_it_was_written_and_tells_the_same(tmp_path):
    report = report_of(RUN, 0.5)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(dict(report.data)))
    found = read_calibration(path)
    assert json.dumps(report_of(found, 0.5).data["calibration"]) == json.dumps(report.data["calibration"])
    assert [row["ranks"] for row in report.data["rows"]] == [2**power for power in range(1, 13)]
    assert "2(n-1)·α" in report.text
    assert "400 ms measured" in report.text


def test_a_run_that_ends_before_its_first_step_reports_the_all_reduces_that_were_measured():
    command = Scale(model="mlp", rounds=1, steps=1)
    command._all_reduces.cases[0].samples = {"hvdlite resident": [2e-3]}
    report = command.report()
    assert [(row["bytes"], row["median_s"]) for row in report.data["rows"]] == [(1024, 2e-3)]
    assert "2.00 ms" in report.text
    assert report.text.endswith("no step was measured")
