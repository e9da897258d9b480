"""
What a calibration says of more ranks: tables, the formula, where the run leaves the model, and where more stops paying.
"""

from __future__ import annotations

from typing import Any

from .calibration import Calibration
from .plot import Chart, Point
from .prediction import MOST_RANKS, Prediction, predict, step_s, stops_paying_at
from .quantities import show_ranks, show_size, show_time
from .report import Report
from .spread import Spread
from .table import Table

FORMULA = (
    "all-reduce of S bytes on n ranks: T(n, S) = 2(n-1)·α + 2(n-1)/n·S·β\n"
    "bucket i is ready at r(i) = forward + backward × its share of the bytes so far, averaged at "
    "e(i) = max(r(i), e(i-1)) + T\n"
    "step = max(forward + backward, e(last)) + update; efficiency = step alone / step; a rank keeps its batch"
)
_COUNTS = tuple(2**power for power in range(1, 13))


def report_of(calibration: Calibration, least_added: float) -> Report:
    """The report of what follows from a run, with where the model leaves it."""
    link, step = calibration.link, calibration.workstep
    predictions = [predict(step, link, ranks) for ranks in _COUNTS]
    stops_at = stops_paying_at(step, link, least_added)
    modelled_s = step_s(step, link, calibration.ranks)
    tables = [_table_of_predictions(predictions, calibration), _table_of_fit(calibration)]
    if stops_at is None:
        verdict = f"Up to {MOST_RANKS} ranks one more adds {least_added:.0%} at least of what one does alone."
    else:
        verdict = f"From {show_ranks(stops_at)} on, one more adds less than {least_added:.0%} of what one does alone."
    notes = [
        FORMULA,
        f"α = {show_time(link.alpha_s)} a message, 1/β = {_gigabytes_per_s(link.beta_s)}, as between the "
        f"{calibration.ranks} ranks of this run: run it across the links that more ranks would use.",
        f"The step of this run, on {calibration.ranks} ranks: {show_time(calibration.measured_step_s)} measured, "
        f"{show_time(modelled_s)} by the model, {calibration.measured_step_s / modelled_s - 1:+.0%}.",
        verdict,
    ]
    data: dict[str, Any] = {
        "calibration": calibration.to_json(),
        "alpha_s": link.alpha_s,
        "beta_s_per_byte": link.beta_s,
        "modelled_step_s": modelled_s,
        "least_added": least_added,
        "stops_paying_at": stops_at,
        "rows": [
            {"ranks": each.ranks, "step_s": each.step_s, "efficiency": each.efficiency, "throughput": each.throughput,
             "added": each.added}
            for each in predictions
        ],
    }  # fmt: skip
    return Report(tables, data, _chart_of(predictions, calibration), notes)


def _gigabytes_per_s(beta_s: float) -> str:
    return "beyond measure" if beta_s == 0 else f"{1e-9 / beta_s:.3g} GB/s"


def _table_of_predictions(predictions: list[Prediction], calibration: Calibration) -> Table:
    rows = [
        [
            str(each.ranks),
            show_time(each.step_s),
            f"{each.efficiency:.1%}",
            f"{each.throughput:.1f}",
            f"{each.added:.2f}",
        ]
        for each in predictions
    ]
    what = f"{calibration.model}, batch {calibration.batch} a rank, wire {calibration.compression}"
    header = ["ranks", "step", "efficiency", "throughput", "one more adds"]
    return Table(header, rows, words=0, title=f"expected of {what}; {show_time(calibration.workstep.alone_s)} alone")


def _table_of_fit(calibration: Calibration) -> Table:
    rows = []
    for nbytes, seconds in calibration.points:
        modelled = calibration.link.all_reduce_s(calibration.ranks, nbytes)
        rows.append([show_size(nbytes), show_time(seconds), show_time(modelled), f"{seconds / modelled - 1:+.0%}"])
    title = f"where the run leaves the model: all-reduces over {calibration.ranks} ranks"
    return Table(["size", "measured", "model", "off by"], rows, words=0, title=title)


def _chart_of(predictions: list[Prediction], calibration: Calibration) -> Chart:
    def exact(value: float) -> Spread:
        return Spread(value, value, value, 1)

    series = {
        "expected": [Point(each.ranks, exact(each.throughput)) for each in predictions],
        "ideal": [Point(each.ranks, exact(each.ranks)) for each in predictions],
        "measured": [
            Point(
                calibration.ranks,
                exact(calibration.ranks * calibration.workstep.alone_s / calibration.measured_step_s),
            )
        ],
    }
    return Chart("lines", f"throughput of {calibration.model}", "ranks", "in what one rank does alone", series)
