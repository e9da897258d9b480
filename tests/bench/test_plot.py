"""What pictures show, looked for in the figure's own objects: places, labels, colours. No pixel is looked at."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hvdlite.bench import allreduce, memory, plot, scale, step
from hvdlite.bench.plot import Chart, figure_of, thinned
from hvdlite.bench.ranks import Job
from hvdlite.bench.report import Case
from hvdlite.bench.scale import Calibration, Parts
from hvdlite.bench.workloads import WORKLOADS

colors = pytest.importorskip("matplotlib.colors")
JOB = Job(4, 2, "shared memory and gloo")
SAMPLES = {"none": [0.1, 0.1], "ddp": [0.2, 0.2], "hvdlite": [0.14, 0.12], "hvdlite-fp16": [0.09]}


def models(*names: str, without: str = "") -> list[Case]:
    samples = {name: each for name, each in SAMPLES.items() if name != without}
    return [Case({"model": name, "batch": 16}, dict(samples)) for name in names]


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def color_of(drawn) -> str:
    return colors.to_hex(drawn)


def panels_of(figure) -> list:
    return [axes for axes in figure.axes if axes.axison]


@pytest.mark.parametrize("names", [["mlp"], ["mlp", "gpt"], ["mlp", "gpt", "resnet-small"], list(WORKLOADS)])
def test_each_model_has_a_panel_of_ratios_to_no_communication(names):
    figure = figure_of(step.report_of(models(*names), JOB).chart)
    panels = panels_of(figure)
    assert [axes.get_title(loc="left").partition(",")[0] for axes in panels] == names
    assert len({axes.get_xlim() for axes in panels}) == 1
    for axes in panels:
        assert [label.get_text() for label in axes.get_yticklabels()] == list(SAMPLES)
        assert texts(axes) == ["1.00", "2.00", "1.30", "0.90"]
        bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
        assert bars == [pytest.approx((1.0, length)) for length in (0.0, 1.0, 0.3, -0.1)]
    assert figure.get_suptitle().replace("\n", " ") == (
        "A training step takes 1.30 times as long with hvdlite as without communication, and 2.00 with ddp"
    )
    assert figure.get_supxlabel().startswith("4 ranks on 2 hosts, over shared memory and gloo. Medians,")


def test_hvdlite_has_the_one_strong_colour_and_its_rivals_are_grey():
    (bars,) = panels_of(figure_of(step.report_of(models("mlp"), JOB).chart))
    assert [color_of(bar.get_facecolor()) for bar in bars.patches] == [plot.OTHER, plot.OTHER, plot.OWN, plot.OWN]
    (lines,) = panels_of(figure_of(allreduce.report_of([case(64), case(2**20)], JOB).chart))
    assert {line.get_label(): color_of(line.get_color()) for line in lines.lines} == {
        "hvdlite any": plot.OWN, "gloo": plot.OTHER, "memcpy": plot.OTHER,
    }  # fmt: skip


def test_milliseconds_are_drawn_where_there_is_no_step_without_communication():
    (axes,) = panels_of(figure_of(step.report_of(models("mlp", without="none"), JOB).chart))
    assert axes.get_xlabel() == "ms"
    assert texts(axes) == ["200 ms", "130 ms", "90.0 ms"]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [
        pytest.approx((0.0, length)) for length in (200, 130, 90)
    ]


@pytest.mark.parametrize("ratio", [1e-6, 1.0, 1e4])
def test_what_is_written_at_a_bar_has_room_beside_it(ratio):
    model = Case({"model": "mlp", "batch": 1}, {"none": [0.1], "hvdlite": [0.1 * ratio]})
    figure = figure_of(step.report_of([model], JOB).chart)
    figure.draw_without_rendering()
    (axes,) = panels_of(figure)
    for text in axes.texts:
        assert text.get_window_extent().x1 <= axes.get_window_extent().x1 + 1


def case(nbytes: int, dtype: str = "float32") -> Case:
    times = {"hvdlite any": [1e-5 + nbytes * 1e-9], "gloo": [2e-5 + nbytes * 2e-9], "memcpy": [0.9e-5 + nbytes * 1e-9]}
    return Case({"bytes": nbytes, "dtype": dtype}, times)


def test_sizes_are_written_as_people_say_them_and_lines_have_their_names_at_their_ends():
    sizes = [4, 2**10, 2**18, 100 * 2**20]
    figure = figure_of(allreduce.report_of([case(size) for size in sizes], JOB).chart)
    (axes,) = panels_of(figure)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4 B", "1 KB", "256 KB", "100 MB"]
    assert list(axes.get_xticks()) == sizes
    assert axes.get_legend() is None
    by_height = sorted(axes.texts, key=lambda text: text.get_position()[1])
    assert [text.get_text() for text in by_height] == ["memcpy", "hvdlite any", "gloo"]
    figure.draw_without_rendering()
    frames = [text.get_window_extent() for text in by_height]
    assert all(below.y1 <= above.y0 for below, above in pairwise(frames))
    assert figure.get_suptitle() == "hvdlite any is 2.00 times as fast as gloo"


def test_each_dtype_has_a_panel():
    cases = [case(64, dtype) for dtype in ("float32", "float16", "int8")]
    panels = panels_of(figure_of(allreduce.report_of(cases, JOB).chart))
    assert [axes.get_title(loc="left") for axes in panels] == ["float32", "float16", "int8"]


def test_of_many_sizes_some_are_written_the_first_and_the_last_among_them():
    sizes = [4 * 4**power for power in range(14)]
    assert thinned(sizes, 8) == [4, 64, 1024, 2**14, 2**18, 2**22, 2**28]
    assert thinned([5], 8) == [5]
    assert thinned([4, 5], 8) == [4, 5]


def calibration(job: Job) -> Calibration:
    points = ((1024, 1e-4), (2**20, 1e-3))
    return Calibration(job, "mlp", 16, "none", points, Parts(0.03, 0.05, 0.01), (2**20, 2**20), 0.12)


@pytest.mark.parametrize("ranks", [2, 3, 64, 5000])
def test_what_was_measured_is_set_apart_from_what_is_predicted_and_that_beyond_it_once_more(ranks):
    steps, reduces = panels_of(figure_of(scale.report_of(calibration(Job(ranks, 2, "gloo")), 0.5).chart))
    looks = {line.get_label(): line for line in steps.lines}
    measured, predicted = looks["measured"], looks["predicted"]
    assert list(measured.get_xdata()) == [1, ranks]
    assert measured.get_ydata()[1] == pytest.approx(ranks * 0.09 / 0.12)
    assert (measured.get_marker(), measured.get_linestyle()) == ("o", "None")
    assert (predicted.get_linestyle(), predicted.get_xdata()[-1]) == ("-", ranks)
    beyond = looks["predicted beyond what was measured"]
    assert (beyond.get_linestyle(), beyond.get_xdata()[0], beyond.get_xdata()[-1]) == (":", ranks, max(ranks, 4096))
    assert {text.get_text() for text in steps.get_legend().get_texts()} == set(looks)
    assert [list(line.get_xdata()) for line in reduces.lines] == [[1024, 2**20]] * 2


def test_scale_says_first_that_all_ranks_shared_a_host():
    shared = str(scale.report_of(calibration(Job(2, 1, "shared memory")), 0.5))
    assert shared.startswith("All 2 ranks of this run shared one host (shared memory): what follows is about ")
    assert "nothing of a network" in shared.partition("\n\n")[0]
    spread = str(scale.report_of(calibration(JOB), 0.5))
    assert spread.startswith("The ranks of this run were 4 ranks on 2 hosts, over shared memory and gloo: ")


def trained(model_bytes: int, samples: dict[str, list[float]]) -> Case:
    return Case({"model": "mlp", "batch": 16, "model_bytes": model_bytes}, samples)


def test_memory_is_drawn_from_zero_with_hvdlite_singled_out():
    samples = {"ddp-view": [200.0 * 2**20], "hvdlite": [210.0 * 2**20]}
    (axes,) = panels_of(figure_of(memory.report_of(trained(100 * 2**20, samples), JOB).chart))
    assert texts(axes) == ["200 MB", "210 MB"]
    assert [bar.get_x() for bar in axes.patches] == [0.0, 0.0]
    assert [color_of(bar.get_facecolor()) for bar in axes.patches] == [plot.OTHER, plot.OWN]


def test_a_run_that_was_stopped_before_its_first_sample_is_drawn_too(tmp_path):
    for report in (
        step.report_of([], Job()),
        allreduce.report_of([], Job()),
        memory.report_of(trained(1, {}), Job()),
    ):
        plot.draw(report.chart, tmp_path / "empty.svg")
        assert "<svg" in (tmp_path / "empty.svg").read_text()
    plot.draw(Chart("t", "", []), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")
