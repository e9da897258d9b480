"""The benchmark's command line: sizes, names and files, how quantities are shown, and the errors for wrong ones."""

from __future__ import annotations

import pytest
import torch

from hvdlite.bench import report
from hvdlite.bench.__main__ import parse
from hvdlite.bench.allreduce import DEFAULT_SIZES
from hvdlite.bench.arguments import OptionError, read_sizes, show_bandwidth, show_ratio, show_size, show_time


def test_a_size_is_in_bytes_or_in_units_of_1024():
    assert read_sizes("100M,4,4K,1g,4,64B,2KiB") == (4, 64, 2048, 4096, 100 * 2**20, 2**30)
    assert (DEFAULT_SIZES[0], DEFAULT_SIZES[-1]) == (4, 256 * 2**20)


def test_quantities_are_shown_with_three_digits_in_a_unit_of_their_size():
    assert [show_size(each) for each in (4, 4096, 1.5 * 2**20, 2**30)] == ["4 B", "4 KB", "1.5 MB", "1 GB"]
    assert [show_time(each) for each in (2e-9, 1.234e-5, 0.5, 12.0)] == ["2 ns", "12.3 µs", "500 ms", "12.0 s"]
    assert [show_bandwidth(each) for each in (2.5e9, 3e7, 1e4, 0, None)] == [
        "2.50 GB/s", "30.0 MB/s", "10.0 KB/s", "–", "–",
    ]  # fmt: skip
    assert [show_ratio(each) for each in (1.934, 123.4, None)] == ["1.93", "123", "–"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("allreduce --sizes 4Q", "hvdlite.bench allreduce: --sizes: '4Q' is not a size, such as 64, 4K or 100M"),
        ("allreduce --sizes 64,0", "hvdlite.bench allreduce: --sizes: '0' is not a size, such as 64, 4K or 100M"),
        ("allreduce --sizes -1", "hvdlite.bench allreduce: --sizes: '-1' is not a size, such as 64, 4K or 100M"),
        (
            "allreduce --dtypes float8",
            "hvdlite.bench allreduce: --dtypes: 'float8' is not a dtype that can be summed: ",
        ),
        ("allreduce --rounds 0", "hvdlite.bench allreduce: --rounds: '0' is not a whole number of at least 1"),
        (
            "step --models mlp,vgg",
            "hvdlite.bench step: --models: 'vgg' is not a model: choose from mlp, gpt, resnet-sma",
        ),
        (
            "step --variants ddp,mpi",
            "hvdlite.bench step: --variants: 'mpi' is not a variant: choose from none, per-par",
        ),
        (
            "memory --optimizer lbfgs",
            "hvdlite.bench memory: --optimizer: invalid choice: 'lbfgs' (choose from ",
        ),
        ("step --batch many", "hvdlite.bench step: --batch: 'many' is not a whole number of at least 1"),
        ("step --device tpu", "hvdlite.bench step: --device: invalid choice: 'tpu' (choose from "),
        (
            "memory --variants horovod",
            "hvdlite.bench memory: --variants: 'horovod' is not a variant: choose from none, ",
        ),
        ("memory --model mlp,gpt", "hvdlite.bench memory: --model: invalid choice: 'mlp,gpt' (choose from "),
        ("fly", "hvdlite.bench: COMMAND: invalid choice: 'fly' (choose from "),
        ("", "hvdlite.bench: the following arguments are required: COMMAND"),
        ("step --fast", "hvdlite.bench: unrecognized arguments: --fast"),
    ],
)
def test_what_does_not_exist_is_told_in_one_line_that_names_the_flag(words, message):
    with pytest.raises(OptionError) as caught:
        parse(words.split(), is_first=True)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told():
    with pytest.raises(OptionError, match=r"hvdlite\.bench step: --device cuda: there is no CUDA device here"):
        parse(["step", "--device", "cuda"], is_first=True)


def test_files_that_cannot_be_written_are_told_before_anything_is_created(tmp_path):
    def why(*words: object) -> str:
        with pytest.raises(OptionError) as caught:
            parse(["allreduce", *map(str, words)], is_first=True)
        return str(caught.value).removeprefix("hvdlite.bench allreduce: ")

    missing = tmp_path / "missing"
    assert why("--json", missing / "a.json").startswith(f"--json: '{missing}/a.json' cannot be written: ")
    assert why("--json", tmp_path).startswith(f"--json: '{tmp_path}' cannot be written: ")
    assert why("--plot", tmp_path / "a.gif") == f"--plot: '{tmp_path}/a.gif' does not end in .png, .pdf, .svg"
    parse(["allreduce", "--json", str(tmp_path / "a.json")], is_first=True)
    assert not list(tmp_path.iterdir())


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(report.importlib, "import_module", refuse)
    with pytest.raises(OptionError, match=r"--plot needs matplotlib: pip install '\.\[bench\]' in hvdlite's"):
        parse(["step", "--plot", "a.png"], is_first=True)


def test_only_rank_0_shows_the_help(capsys):
    for is_first in (True, False):
        with pytest.raises(SystemExit) as caught:
            parse(["allreduce", "--help"], is_first=is_first)
        assert caught.value.code == 0
        assert ("--sizes" in capsys.readouterr().out) is is_first
