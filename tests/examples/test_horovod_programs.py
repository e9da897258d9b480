"""Programs as people wrote them for Horovod, which do not mention hvdlite: with the shim they run and learn."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from copied_ranks import RankServer
from examples.test_examples import (
    ROOT,
    Done,
    hvdlite_run,
    lines_of,
    require_clean,
    run_words,
    start_words,
    wait_for_line,
)
from long_run import chosen

__all__ = ["hvdlite_run"]

pytestmark = pytest.mark.slow

PROGRAMS = ROOT / "examples" / "horovod"
TOLERANCE = 1e-4


@pytest.fixture
def run(hvdlite_run: list[str], rank_server: RankServer) -> Callable[..., list[str]]:
    """Provides a function that returns rank 0's output, with this many workers or in one process.

    ``by_flag``: hvdlite-run has the shim.
    """

    def run_program(program: str, *args: object, ranks: int | None = None, by_flag: bool = False) -> list[str]:
        launcher = [*rank_server.python()] if ranks is None else [*hvdlite_run, "-np", str(ranks), sys.executable]
        shim = ["-m", "hvdlite.horovod"]
        if by_flag:
            launcher, shim = [*launcher[:-1], "--horovod", launcher[-1]], []
        done: Done[str] = run_words(*launcher, *shim, f"examples/horovod/{program}", *map(str, args))
        require_clean(done)
        if ranks is None:
            return done.stdout.splitlines()
        assert all(lines_of(rank, done.stdout) == [] for rank in range(1, ranks)), "rank 0 prints alone"
        return lines_of(0, done.stdout)

    return run_program


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"-?\d+\.\d+", line)]


def test_workers_of_an_elastic_program_come_and_go_as_a_file_says(hvdlite_run: list[str], tmp_path: Path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    flags = ["--horovod", "--min-np", "1", "--host-discovery-script", f"cat {hosts}"]
    program = [sys.executable, "examples/horovod/elastic.py", "--epochs", "1000000"]
    with start_words(*hvdlite_run, *flags, *program) as job:
        for slots in (2, 1):
            wait_for_line(job, rf"\[0\]<stdout>:Epoch \d+: loss .* on {3 - slots} workers")
            hosts.write_text(f"localhost:{slots}\n")
        wait_for_line(job, r"\[0\]<stdout>:Epoch \d+: loss .* on 1 workers")
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=200)
    assert job.returncode == 130, err
    assert "hvdlite-run: generation 3: 1 rank" in err


def test_the_programs_name_horovod_alone():
    programs = sorted(PROGRAMS.glob("*.py"))
    assert [program.name for program in programs] == [
        *("elastic.py", "gan.py", "mnist.py", "resume.py", "synthetic_benchmark.py")
    ]
    for program in programs:
        text = program.read_text()
        code = text.split('"""', 2)[2]
        assert "import horovod.torch as hvd" in code
        assert "hvdlite" not in code


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_digits_on_two_ranks_are_learned_as_by_one_process_with_twice_the_batches(run: Callable[..., list[str]]):
    one = run("mnist.py", "--batches-per-allreduce", 2, "--gradient-predivide-factor", 2)
    two = run("mnist.py", "--gradient-predivide-factor", 2, ranks=2)
    assert len(one) == len(two) == 7
    assert numbers(two) == pytest.approx(numbers(one), abs=TOLERANCE)
    accuracy = numbers(two)[-1]
    assert accuracy > 88, two


@pytest.mark.night
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_digits_are_learned_in_mixed_precision_with_gradients_in_half_precision(run: Callable[..., list[str]]):
    lines = run("mnist.py", "--use-mixed-precision", "--fp16-allreduce", ranks=2)
    assert numbers(lines)[-1] > 88, lines


@pytest.mark.night
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
@pytest.mark.parametrize(
    "flags",
    chosen(
        [["--use-adasum"], ["--use-adasum", "--batches-per-allreduce", 2], []],
        few=[["--use-adasum", "--batches-per-allreduce", 2]],
    ),
)
def test_digits_are_learned_with_adasum_and_without_a_warm_up(run: Callable[..., list[str]], flags: list[object]):
    lines = run("mnist.py", "--warmup-epochs", 0, *flags, ranks=2)
    assert numbers(lines)[-1] > 80, lines


@pytest.mark.night
def test_a_gan_on_two_ranks_comes_to_what_it_comes_to_in_one_process(run: Callable[..., list[str]]):
    one = run("gan.py", "--double", "--steps", 300)
    two = run("gan.py", "--double", "--steps", 300, ranks=2, by_flag=True)
    assert len(one) == len(two) == 4
    assert numbers(two) == pytest.approx(numbers(one), abs=TOLERANCE)
    assert numbers(two)[-2] == pytest.approx(1, abs=0.3), "it has found the ring"


@pytest.mark.night
def test_training_goes_on_where_it_was_stopped_as_if_it_had_not_been(run: Callable[..., list[str]], tmp_path: Path):
    def train(directory: str, epochs: int, batch: int, ranks: int | None) -> list[str]:
        (tmp_path / directory).mkdir(exist_ok=True)
        checkpoint = f"{tmp_path}/{directory}/{{epoch}}.pt"
        args = ["--checkpoint-format", checkpoint, "--epochs", epochs, "--batch-size", batch]
        return run("resume.py", *args, ranks=ranks)

    whole = train("whole", 6, 32, 2)
    assert [line.partition(":")[0] for line in whole] == [f"Epoch {number}" for number in range(1, 7)]
    assert train("parts", 3, 32, 2) + train("parts", 6, 32, 2) == whole, "to the last digit"
    assert numbers(train("alone", 6, 64, None)) == pytest.approx(numbers(whole), abs=TOLERANCE)
    assert numbers(whole)[-1] < 0.5 * numbers(whole)[0]


@pytest.mark.night(but=1)
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.parametrize(
    ("ranks", "flags"),
    chosen([(None, []), (2, ["--fp16-allreduce"]), (2, ["--use-adasum"])], few=[(None, []), (2, ["--fp16-allreduce"])]),
)
def test_the_benchmark_has_the_command_line_and_the_last_lines_that_are_known(
    run: Callable[..., list[str]], ranks: int | None, flags: list[str]
):
    size = ranks or 1
    known = ["--model", "resnet18", "--batch-size", 2, "--num-warmup-batches", 1, "--num-batches-per-iter", 1]
    lines = run("synthetic_benchmark.py", *known, "--num-iters", 2, "--no-cuda", *flags, ranks=ranks)
    assert lines[:3] == ["Model: resnet18", "Batch size: 2", f"Number of CPUs: {size}"]
    number = r"\d+\.\d"
    assert re.fullmatch(rf"Img/sec per CPU: {number} \+-{number}", lines[-2])
    assert re.fullmatch(rf"Total img/sec on {size} CPU\(s\): {number} \+-{number}", lines[-1])
    assert numbers([lines[-1]])[0] == pytest.approx(size * numbers([lines[-2]])[0], abs=0.1 * size)
