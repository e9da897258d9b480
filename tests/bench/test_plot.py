"""The benchmark's plots, checked by the figure's objects: positions, labels and colours, but no pixels."""

from __future__ import annotations

import pytest

from hvdlite.bench import report
from hvdlite.bench.allreduce import AllReduceComparison, case_of
from hvdlite.bench.arguments import show_size
from hvdlite.bench.ranks import Job
from hvdlite.bench.report import Chart, Command, figure_of
from hvdlite.bench.training import WORKLOADS
from hvdlite.bench.variants import Memory, StepComparison

colors = pytest.importorskip("matplotlib.colors")
JOB = Job(4, 2, "shared memory and gloo")
SAMPLES = {"none": [0.1, 0.1], "ddp": [0.2, 0.2], "hvdlite": [0.14, 0.12], "hvdlite-fp16": [0.09]}


def drawn(command: Command):
    """Returns the figure of a command's report on a run by `JOB`."""
    command.job = JOB
    return figure_of(command.report().chart)


def steps(*names: str, **samples: list[float]) -> StepComparison:
    command = StepComparison(None, None, None, 1)
    command.cases = [case for case in command.cases if case.about["model"] in names]
    for case in command.cases:
        case.skipped, case.samples = None, samples or dict(SAMPLES)
    return command


def all_reduces(*sizes_and_dtypes: tuple[int, str]) -> AllReduceComparison:
    command = AllReduceComparison([], [], 1)
    command.cases = [case_of(*each) for each in sizes_and_dtypes]
    for case in command.cases:
        s = case.about["bytes"] * 1e-9
        case.samples = {"hvdlite any": [1e-5 + s], "gloo": [2e-5 + 2 * s], "memcpy": [0.9e-5 + s]}
    return command


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def color_of(color) -> str:
    return colors.to_hex(color)


def panels_of(figure) -> list:
    return [axes for axes in figure.axes if axes.axison]


@pytest.mark.parametrize("names", [["mlp"], ["mlp", "gpt"], ["mlp", "gpt", "resnet-small"], list(WORKLOADS)])
def test_each_model_has_a_panel_of_times_with_ratios_to_no_communication(names):
    figure = drawn(steps(*names))
    panels = panels_of(figure)
    assert [axes.get_title(loc="left") for axes in panels] == names
    for axes in panels:
        assert [label.get_text() for label in axes.get_yticklabels()] == list(SAMPLES)
        assert texts(axes) == [
            "100 ms, 1.00 × none",
            "200 ms, 2.00 × none",
            "130 ms, 1.30 × none",
            "90.0 ms, 0.90 × none",
        ]
        bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
        assert bars == [pytest.approx((0.0, length)) for length in (100, 200, 130, 90)]
    assert figure.get_suptitle() == "How long a training step takes"
    assert figure.get_supxlabel().startswith("a training step on 4 ranks on 2 hosts, over shared memory")


def test_hvdlite_has_the_one_strong_colour_and_its_rivals_are_grey():
    (bars,) = panels_of(drawn(steps("mlp")))
    assert [color_of(bar.get_facecolor()) for bar in bars.patches] == [
        report.OTHER,
        report.OTHER,
        report.OWN,
        report.OWN,
    ]
    (lines,) = panels_of(drawn(all_reduces((64, "float32"), (2**20, "float32"))))
    assert {line.get_label(): color_of(line.get_color()) for line in lines.lines} == {
        "hvdlite any": report.OWN, "gloo": report.OTHER, "memcpy": report.OTHER,
    }  # fmt: skip


@pytest.mark.parametrize("ratio", [1e-6, 1.0, 1e4])
def test_what_is_written_at_a_bar_has_room_beside_it(ratio):
    figure = drawn(steps("mlp", none=[0.1], hvdlite=[0.1 * ratio]))
    figure.draw_without_rendering()
    (axes,) = panels_of(figure)
    for text in axes.texts:
        assert text.get_window_extent().x1 <= axes.get_window_extent().x1 + 1


def test_sizes_are_written_as_people_say_them_and_lines_have_their_names_in_a_legend():
    (axes,) = panels_of(drawn(all_reduces(*[(4 * 4**power, "float32") for power in range(14)])))
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    labels = axes.xaxis.get_major_formatter().format_ticks(ticks)
    assert 4 <= len(ticks) <= 12
    assert labels == [show_size(tick) for tick in ticks]
    assert all(tick.is_integer() for tick in ticks)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["hvdlite any", "gloo", "memcpy"]


def test_each_dtype_has_a_panel():
    panels = panels_of(drawn(all_reduces(*[(64, dtype) for dtype in ("float32", "float16", "int8")])))
    assert [axes.get_title(loc="left") for axes in panels] == ["float32", "float16", "int8"]


def test_memory_is_drawn_from_zero_with_hvdlite_singled_out():
    command = Memory("mlp", None, None, 1)
    command.cases[0].samples = {"ddp-view": [200.0 * 2**20], "hvdlite": [210.0 * 2**20]}
    (axes,) = panels_of(drawn(command))
    assert texts(axes) == ["200 MB", "210 MB"]
    assert [bar.get_x() for bar in axes.patches] == [0.0, 0.0]
    assert [color_of(bar.get_facecolor()) for bar in axes.patches] == [report.OTHER, report.OWN]


def test_a_run_that_was_stopped_before_its_first_sample_is_drawn_too(tmp_path):
    for command in (StepComparison([], None, None, 1), all_reduces(), Memory("mlp", None, None, 1)):
        figure_of(command.report().chart).savefig(tmp_path / "empty.svg")
        assert "<svg" in (tmp_path / "empty.svg").read_text()
    figure_of(Chart("t", "", [])).savefig(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")
