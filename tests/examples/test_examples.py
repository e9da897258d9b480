"""The examples run as their users run them, and print what they should."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import pytest
from copied_ranks import RankServer
from long_run import chosen

pytest.importorskip("tqdm")
if importlib.util.find_spec("sklearn") is None:
    pytest.skip("scikit-learn is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WAYS = ["by hand", "sum", "DDP", "Horovod", "hvdlite"]

Done = subprocess.CompletedProcess


def run_words(*words: str) -> Done[str]:
    """Runs Python with these arguments in the directory of the project."""
    # One thread per rank, since more would compete for the cores of a busy machine.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, *words]
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250, check=False)


def start_words(*words: str) -> subprocess.Popen[str]:
    """Python, in the directory of the project, with its output to be read while it runs."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, *words]
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def hvdlite_run(rank_server: RankServer) -> list[str]:
    """Provides Python's arguments for hvdlite-run, whose ranks start at once."""
    return [*rank_server.launcher()]


@pytest.fixture
def run(hvdlite_run: list[str], rank_server: RankServer) -> Callable[..., Done[str]]:
    """Provides a function that returns the output of an example, on this many ranks, or without hvdlite-run."""

    def run_example(example: str, *args: object, ranks: int | None = None) -> Done[str]:
        launcher = rank_server.python() if ranks is None else [*hvdlite_run, "-np", str(ranks), sys.executable]
        return run_words(*launcher, f"examples/{example}", *map(str, args))

    return run_example


def wait_for_line(job: subprocess.Popen[str], pattern: str, *, stream: str = "stdout") -> re.Match[str]:
    """Reads lines until one matches; what was read is gone."""
    lines = getattr(job, stream)
    for line in lines:
        if match := re.match(pattern, line):
            return match
    raise AssertionError(f"the job ended before it printed {pattern}: {job.communicate()}")


def load(example: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(example.removesuffix(".py"), EXAMPLES / example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def lines_of(rank: int, output: str) -> list[str]:
    """Returns the lines that the rank printed on stdout, without the launcher's prefix."""
    prefix = f"[{rank}]<stdout>:"
    return [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]


def require_clean(done: Done[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


# -- digits.py


def accuracy_of(done: Done[str]) -> float:
    found = re.findall(r"test accuracy ([\d.]+)% on 359 images", done.stdout)
    assert len(found) == 1, f"said once, by rank 0: {done.stdout}"
    return float(found[0])


@pytest.mark.slow
def test_digits_are_learned_on_two_ranks_and_plotted(run: Callable[..., Done[str]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "digits.png"
    done = run("digits.py", "--plot", picture, "--min-accuracy", 0.97, ranks=2)
    require_clean(done)
    assert accuracy_of(done) >= 97.0
    assert "on 2 ranks" in done.stdout
    assert lines_of(1, done.stdout) == []
    assert "[1]<stderr>" not in done.stderr, "rank 1 draws no bar"
    assert "20/20" in done.stderr
    png = picture.read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    assert (width, height) == (1350, 600)
    assert len(png) > 20_000, "there are curves in it"


@pytest.mark.night
@pytest.mark.slow
def test_digits_run_on_three_ranks_with_gradients_in_half_precision(run: Callable[..., Done[str]]) -> None:
    done = run("digits.py", "--epochs", 8, "--batch-size", 24, "--lr", 0.04, "--fp16-allreduce", ranks=3)
    require_clean(done)
    assert accuracy_of(done) >= 93.0
    assert "after 8 epochs on 3 ranks" in done.stdout


@pytest.mark.slow
def test_digits_alone_say_that_the_accuracy_was_not_reached(run: Callable[..., Done[str]]) -> None:
    done = run("digits.py", "--epochs", 1, "--min-accuracy", 0.999)
    assert done.returncode == 1
    assert "after 1 epoch on 1 rank" in done.stdout
    accuracy = accuracy_of(done)
    assert done.stderr.splitlines()[-1] == (f"digits.py: test accuracy {accuracy:.2f}% is below --min-accuracy 99.90%")


@pytest.mark.slow
def test_an_accuracy_that_was_not_reached_is_the_exit_code_of_the_launcher(run: Callable[..., Done[str]]) -> None:
    done = run("digits.py", "--epochs", 1, "--min-accuracy", 0.999, ranks=2)
    assert done.returncode == 1
    assert re.search(r"rank 0 .*exit code 1", done.stderr), "the rank that says why is the one reported"


@pytest.mark.slow
def test_digits_refuse_a_plot_where_there_is_no_directory(run: Callable[..., Done[str]], tmp_path: Path) -> None:
    done = run("digits.py", "--plot", tmp_path / "nowhere" / "digits.png")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"argument --plot: there is no directory {tmp_path / 'nowhere'}")


# -- elastic.py


@pytest.mark.night(but=1)
@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_digits_are_learned_though_a_worker_is_killed(hvdlite_run: list[str], is_first: bool) -> None:
    program = [sys.executable, "examples/elastic.py", "--min-accuracy", "0.97", "--epochs", "30"]
    with start_words(*hvdlite_run, "--min-np", "1", "--max-np", "2", *program) as job:
        bar = wait_for_line(job, r"\[0\]<stderr>:training on 2 ranks \(pid (\d+)\).* 0/30", stream="stderr")
        shows = int(bar[1])
        workers = [each for each in psutil.Process(shows).parent().children() if "HVDLITE_WORKER" in each.environ()]
        victim = next(worker for worker in workers if (worker.pid == shows) == is_first)
        # In a pipe a bar is a line every five seconds. An epoch takes some hundredths of one of a core.
        begun_s = victim.cpu_times().user
        while victim.cpu_times().user < begun_s + 0.5:
            time.sleep(0.02)
        victim.kill()
        out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert "training on 1 rank (pid" in err
    assert re.search(
        r"hvdlite-run: generation 2: 1 rank; worker \d \(rank \d on localhost\) was killed by SIGKILL", err
    )
    assert re.search(r"\[0\]<stdout>:test accuracy 9[7-9]\.\d+% on 359 images", out)


# -- mnist.py


@pytest.fixture
def mnist_dir(tmp_path: Path) -> Path:
    """Provides scikit-learn's digits at MNIST's size, in files of MNIST's format."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    from sklearn import datasets  # noqa: PLC0415  # it takes a second

    digits = datasets.load_digits()
    enlarged = np.kron(digits.images, np.ones((3, 3))) * (255 / 16)
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    for name, part in (("train", slice(0, 1400)), ("t10k", slice(1400, None))):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(images[part]))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels[part]))
    return tmp_path


def idx(array: np.ndarray) -> bytes:
    """Returns the array in the format of the MNIST files: unsigned bytes, big-endian sizes."""
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">i4")
    return header.tobytes() + array.tobytes()


@pytest.mark.night(but=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    chosen(
        [(2, []), (2, ["--amp", "--fp16-allreduce"]), (3, []), (None, [])],
        few=[(2, ["--amp", "--fp16-allreduce"]), (None, [])],
    ),
)
def test_mnist_is_learned_from_its_files(
    run: Callable[..., Done[str]], mnist_dir: Path, ranks: int | None, flags: list[str]
) -> None:
    pytest.importorskip("torchvision")
    done = run("mnist.py", "--data-dir", mnist_dir, "--epochs", 4, "--batch-size", 16, *flags, ranks=ranks)
    require_clean(done)
    accuracies = [float(found) for found in re.findall(r"test accuracy ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 4, f"one line per epoch, by rank 0: {done.stdout}"
    assert accuracies[-1] >= 85.0
    losses = [float(found) for found in re.findall(r"training loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_mnist_says_in_one_line_what_to_do_without_data(
    run: Callable[..., Done[str]], tmp_path: Path, ranks: int | None
) -> None:
    pytest.importorskip("torchvision")
    done = run("mnist.py", "--data-dir", tmp_path, ranks=ranks)
    assert done.returncode == 2
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.removeprefix("[0]<stderr>:").startswith("mnist.py: ")]
    assert len(said) == 1, done.stderr
    for part in (str(tmp_path / "MNIST" / "raw"), "--download", "--data-dir"):
        assert part in said[0]
    assert "Traceback" not in done.stderr
    if ranks is None:
        assert done.stderr.splitlines() == said
    else:
        assert "rank 1" not in done.stderr, "the rank that says why is the one reported"


# -- five_ways.py


def read_table(lines: list[str]) -> tuple[dict[tuple[int, int], list[float]], list[float]]:
    """Returns the losses by (epoch, rank), and the milliseconds per step; each a list for the five ways."""
    header = next(line for line in lines if line.startswith("loss of"))
    assert re.split(r"\s{2,}", header.removeprefix("loss of").strip()) == WAYS
    losses = {}
    for line in lines:
        if row := re.match(r"epoch +(\d+) rank +(\d+) (.*)", line):
            losses[int(row[1]), int(row[2])] = [float(cell) for cell in row[3].split()]
    steps = next(line for line in lines if line.startswith("ms per step"))
    return losses, [float(cell) for cell in steps.removeprefix("ms per step").split()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", chosen([None, 2, 3], few=[2]))
def test_five_ways_agree(run: Callable[..., Done[str]], ranks: int | None) -> None:
    done = run("five_ways.py", "--epochs", 2, "--batch-size", 48, "--lr", 0.1, "--seed", 3, ranks=ranks)
    require_clean(done)
    lines = done.stdout.splitlines() if ranks is None else lines_of(0, done.stdout)
    losses, step_ms = read_table(lines)
    assert set(losses) == {(epoch, rank) for epoch in (1, 2) for rank in range(ranks or 1)}
    for row in losses.values():
        assert len(row) == len(WAYS)
        assert max(row) - min(row) <= 1e-5
    for rank in range(ranks or 1):
        assert losses[2, rank][0] < losses[1, rank][0]
    assert len({tuple(row) for row in losses.values()}) == len(losses), "every rank has images of its own"
    assert len(step_ms) == len(WAYS)
    assert min(step_ms) > 0
    assert lines[-1] == "All five agree to 1e-05 in every epoch on every rank."


def test_a_way_that_differs_is_named() -> None:
    five_ways = load("five_ways.py")
    losses = {name: [[2.0, 1.0], [2.1, 1.1]] for name in WAYS}
    assert list(five_ways.WAYS) == WAYS
    assert five_ways.first_difference(losses) is None
    losses["DDP"] = [[2.0, 1.0], [2.1, 1.1 + 9e-6]]
    assert five_ways.first_difference(losses) is None
    losses["Horovod"] = [[2.0, 1.0], [2.1, 1.1001]]
    assert five_ways.first_difference(losses) == (
        "'Horovod' differs from 'by hand' by 0.0001 in epoch 2 on rank 1: 1.1001000 instead of 1.1000000"
    )
    losses["Horovod"] = [[float("nan"), 1.0], [2.1, 1.1]]
    assert "'Horovod' differs from 'by hand' by nan in epoch 1 on rank 0" in five_ways.first_difference(losses)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_partition_made_by_hand_is_that_of_the_distributed_sampler(size: int) -> None:
    torch = pytest.importorskip("torch")
    five_ways = load("five_ways.py")
    data = torch.utils.data.TensorDataset(torch.arange(50))
    for rank in range(size):
        sampler = torch.utils.data.DistributedSampler(data, size, rank, seed=5, drop_last=True)
        sampler.set_epoch(2)
        part = five_ways.DataPartitioner(data, size, seed=5 + 2).part(rank)
        assert [int(row[0]) for row in part] == list(sampler)


# -- all


@pytest.mark.night(but=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("digits.py", "--epochs --batch-size --lr --seed --fp16-allreduce --plot --min-accuracy"),
        ("five_ways.py", "--epochs --batch-size --lr --seed"),
        ("mnist.py", "--data-dir --download --epochs --batch-size --lr --amp --fp16-allreduce"),
    ],
)
def test_help_lists_the_options_and_trains_nothing(run: Callable[..., Done[str]], example: str, options: str) -> None:
    if example == "mnist.py":
        pytest.importorskip("torchvision")
    done = run(example, "--help")
    assert done.returncode == 0
    assert done.stderr == "", "no bar"
    for option in options.split():
        assert option in done.stdout
    assert f"hvdlite-run -np 2 python examples/{example}" in " ".join(done.stdout.split())
