"""
What a calibration says of more ranks: tables, the formula, where the run leaves the model, and where more stops paying.
"""

from __future__ import annotations

from typing import Any

from .calibration import Calibration
from .plot import Chart, Line, Lines, Point
from .prediction import MOST_RANKS, Prediction, predict, step_s, stops_paying_at, throughput
from .quantities import show_ranks, show_round_time, show_size, show_time
from .report import Report
from .setting import Setting
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
    elif stops_at == 1:
        verdict = f"Even a second rank adds less than {least_added:.0%} of what one does alone."
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
    return Report(tables, data, _chart_of(calibration, verdict), notes, opening=_opening_of(calibration.setting))


def _opening_of(setting: Setting) -> str:
    if setting.hosts == 1:
        return (
            f"All {setting.ranks} ranks of this run shared one host ({setting.wire}): what follows is about more ranks "
            "on a\nhost like it, with a core or a GPU for each, and says nothing of a network. For that, run it with "
            "one\nrank on each of two hosts or more: hvdlite-run -H node1,node2 python -m hvdlite.bench scale"
        )
    return f"The ranks of this run were {setting}: what follows is about more ranks with such links between them."


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
    title = f"where the run leaves the model: all-reduces between {calibration.ranks} ranks"
    return Table(["size", "measured", "model", "off by"], rows, words=0, title=title)


def _chart_of(calibration: Calibration, verdict: str) -> Chart:
    return Chart(
        verdict,
        f"{calibration.model}, batch {calibration.batch} of each rank, wire {calibration.compression}; measured with "
        f"{calibration.setting}" + (", so nothing of a network is in it." if calibration.setting.hosts == 1 else "."),
        [_panel_of_throughput(calibration), _panel_of_fit(calibration)],
    )


def _panel_of_throughput(calibration: Calibration) -> Lines:
    link, step, here = calibration.link, calibration.workstep, calibration.ranks
    measured = [(1, 1.0), (here, here * calibration.workstep.alone_s / calibration.measured_step_s)]
    within = [1, *(ranks for ranks in _COUNTS if ranks < here), here]
    beyond = [here, *(ranks for ranks in _COUNTS if ranks > here)]
    lines = [
        Line("measured", [_exact(*each) for each in measured], is_own=True, look="only points"),
        Line(
            "predicted",
            [_exact(ranks, throughput(step, link, ranks)) for ranks in within],
            is_own=True,
            look="modelled",
        ),
        Line(
            "predicted beyond what was measured",
            [_exact(ranks, throughput(step, link, ranks)) for ranks in beyond],
            is_own=True,
            look="beyond",
        ),
        Line(
            "if communication took no time",
            [_exact(ranks, ranks) for ranks in (1, *beyond)],
            is_own=False,
            look="modelled",
        ),
    ]
    return Lines(
        "a training step", "ranks", "throughput, in what one rank does alone", "{:g}".format, "{:g}".format, lines
    )


def _panel_of_fit(calibration: Calibration) -> Lines:
    ranks = calibration.ranks
    modelled = [(nbytes, calibration.link.all_reduce_s(ranks, nbytes)) for nbytes, _ in calibration.points]
    lines = [
        Line("measured", [_exact(*each) for each in calibration.points], is_own=True, look="only points"),
        Line("by the model, fitted to these", [_exact(*each) for each in modelled], is_own=True, look="modelled"),
    ]
    return Lines(f"an all-reduce between {ranks} ranks", "size", "time", show_size, show_round_time, lines)


def _exact(place: float, value: float) -> Point:
    return Point(place, Spread(value, value, value, 1))
