"""What the benchmark computes from samples: medians, ratios and tables, and reports of unfinished runs."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import attempt_worlds

import hvdlite as hvd
from hvdlite.bench import training
from hvdlite.bench.allreduce import DTYPES, AllReduceComparison, _checked, bus_factor, case_of
from hvdlite.bench.arguments import OptionError
from hvdlite.bench.ranks import Job, Ranks, free_in_cgroup
from hvdlite.bench.report import Case, ratio_of, spread, table
from hvdlite.bench.training import OPTIMIZERS, VARIANTS, WORKLOADS, horovod_module, small_resnet
from hvdlite.bench.variants import Memory, StepComparison
from hvdlite.runtime.world import current_world


def test_quartiles_lie_between_samples_where_they_must():
    four, one = [4.0, 1.0, 3.0, 2.0], [7.0]
    assert spread(four, "s") == {"median_s": 2.5, "low_s": 1.75, "high_s": 3.25, "count": 4, "samples_s": four}
    assert spread(one, "s") == {"median_s": 7.0, "low_s": 7.0, "high_s": 7.0, "count": 1, "samples_s": one}


def test_a_ratio_to_what_was_not_measured_or_took_no_time_is_none():
    assert ratio_of(6.0, 2.0) == 3.0
    assert ratio_of(6.0, None) is None
    assert ratio_of(None, 2.0) is None
    assert ratio_of(6.0, 0.0) is None


def test_a_table_has_words_to_the_left_and_numbers_to_the_right():
    rows = [{"what": "a", "ms": 1}, {"what": "longer", "ms": 10}]
    columns = {"what": lambda row: row["what"], "time": lambda row: f"{row['ms']} ms"}
    assert table("t", rows, columns, text_columns=1) == "t\n\nwhat     time\na        1 ms\nlonger  10 ms"


def all_reduces(*cases: Case, ranks: int = 2) -> AllReduceComparison:
    """Returns the command with these all-reduces measured."""
    command = AllReduceComparison([], [], 1)
    command.cases, command.job = cases, Job(ranks)
    return command


def test_bandwidths_are_as_nccls_tests_define_them():
    assert [bus_factor(ranks) for ranks in (1, 2, 4)] == [0, 1, 1.5]
    samples = {"hvdlite any": [1e-6, 3e-6, 2e-6], "gloo": [8e-6], "memcpy": [1e-6]}
    command = all_reduces(Case("", {"bytes": 4000, "dtype": "float32"}, samples), ranks=4)
    rows = {row["what"]: row for row in command.report().data["rows"]}
    assert rows["hvdlite any"]["algorithm_Bps"] == pytest.approx(4000 / 2e-6)
    assert rows["hvdlite any"]["bus_Bps"] == pytest.approx(1.5 * 4000 / 2e-6)
    assert rows["hvdlite any"]["times_faster_than_rival"] == pytest.approx(4)
    assert rows["hvdlite any"]["times_the_limit"] == pytest.approx(2)
    assert rows["memcpy"]["bus_Bps"] is None


class LargestResult(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple) else (made,):
            if isinstance(each, torch.Tensor):
                self.nbytes = max(self.nbytes, each.nbytes)
        return made


@pytest.mark.parametrize("name", DTYPES)
def test_the_sum_of_ones_is_checked_without_another_tensor_of_that_size(name):
    tensor = torch.zeros(4096, dtype=DTYPES[name])
    with LargestResult() as largest:
        _checked(SimpleNamespace(size=300, rank=0), "mine", tensor, lambda ones: ones.copy_(torch.tensor(300)))
    assert largest.nbytes == tensor.nbytes


@pytest.mark.parametrize(("dtype", "wrong"), [(torch.float32, 2), (torch.float32, math.nan), (torch.int64, 4)])
def test_a_sum_of_ones_with_a_single_wrong_element_is_an_error(dtype, wrong):
    def reduce(ones: torch.Tensor) -> None:
        ones.mul_(3)[7] = wrong

    with pytest.raises(hvd.HvdliteError, match="mine: the sum of ones over 3 ranks is wrong on rank 1"):
        _checked(SimpleNamespace(size=3, rank=1), "mine", torch.zeros(9, dtype=dtype), reduce)


def test_what_is_measured_so_far_is_reported_and_the_rest_left_out():
    done, begun, large, later = (
        case_of(*each) for each in ((64, "float32"), (256, "float32"), (2**40, "int8"), (4, "int8"))
    )
    done.samples, begun.samples = {"gloo": [1e-6]}, {"gloo": []}
    large.skipped = "needs 5120 GB, and 1 GB of memory are free on node1"
    report = all_reduces(done, begun, large, later).report()
    assert [row["bytes"] for row in report.data["rows"]] == [64]
    assert "skipped: 1024 GB int8: needs 5120 GB, and 1 GB of memory are free on node1" in report.text
    steps = StepComparison(["mlp", "gpt"], None, None, 1)
    steps.cases[0].samples = {"none": [1.0, 2.0], "ddp": [3.0], "hvdlite": []}
    assert [(row["variant"], row["times_none"], row["times_ddp"]) for row in steps.report().data["rows"]] == [
        ("none", 1.0, 0.5), ("ddp", 2.0, 1.0),
    ]  # fmt: skip
    peaks = Memory("mlp", None, None, 1)
    peaks.cases[0].about["model_bytes"] = 100
    peaks.cases[0].samples = {"ddp-view": [200.0], "hvdlite": [210.0], "none": []}
    assert [
        (row["variant"], row["above_reference_bytes"], row["in_models"]) for row in peaks.report().data["rows"]
    ] == [("ddp-view", 0.0, 2.0), ("hvdlite", 10.0, 2.1)]
    for command in (all_reduces(case_of(4, "int8")), StepComparison([], None, None, 1), Memory("mlp", None, None, 1)):
        empty = command.report()
        assert empty.data["rows"] == []
        assert "× " in empty.text


def test_ranks_that_would_measure_on_different_devices_all_say_so():
    def rank(own: int) -> None:
        Ranks(current_world(), "cuda" if own else "cpu")

    for error in attempt_worlds(2, rank):
        assert isinstance(error, OptionError)
        assert re.fullmatch(r"rank 0 would measure on cpu and rank 1 \(.+\) on cuda: pass --device cpu.*", str(error))


def test_one_rank_measures_too_and_its_report_goes_through_json():
    hvd.init()
    ranks = Ranks(current_world(), "cpu")
    try:
        command = AllReduceComparison([64, 4096], ["float32", "bfloat16"], rounds=2)
        command.run(ranks)
        rows = json.loads(json.dumps(dict(command.report().data)))["rows"]
        assert {(row["bytes"], row["dtype"], row["what"], row["count"]) for row in rows} == {
            (nbytes, dtype, what, 2)
            for nbytes in (64, 4096)
            for dtype in ("float32", "bfloat16")
            for what in ("hvdlite", "hvdlite call", "gloo", "memcpy")
        }
        huge = AllReduceComparison([2**50], ["float32"], rounds=2)
        huge.run(ranks)
        assert "of memory are free" in huge.report().data["skipped"][0]["why"]
    finally:
        ranks.close()


MODELS_IN_BLOCKS_OF_THEIR_OWN = """
import ctypes, dataclasses
import torch
import hvdlite as hvd
from hvdlite.bench.ranks import Ranks
from hvdlite.bench.training import WORKLOADS
from hvdlite.bench.variants import Memory
from hvdlite.runtime.world import current_world

class Mallinfo2(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
WIDTH = 1024
in_blocks = []

def build():
    before = libc.mallinfo2().hblkhd
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    in_blocks.append(libc.mallinfo2().hblkhd - before >= 4 * WIDTH**2)
    return model

# As after any large block was freed: glibc takes the next ones of that size from its heap, unless told otherwise.
del (large := [torch.empty(4 * WIDTH**2)])[:]
hvd.init()
ranks = Ranks(current_world(), "cpu")
command = Memory("mlp", ["none"], 1, 1)
inputs = lambda rows: torch.randn(rows, WIDTH)
command._workload = dataclasses.replace(WORKLOADS["mlp"], build=build, inputs=inputs, classes=WIDTH)
command.prepare(ranks)
command.run(ranks)
ranks.close()
print(in_blocks)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc, whose blocks can be counted")
def test_every_model_whose_training_is_measured_goes_back_to_the_system_when_it_is_freed():
    # In a process of its own, because glibc keeps its settings.
    command = [sys.executable, "-c", MODELS_IN_BLOCKS_OF_THEIR_OWN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # One run to learn the size, one before, and the one that is measured.
    assert done.stdout.splitlines()[-1:] == ["[True, True, True]"], done.stderr


@pytest.mark.slow
def test_models_have_the_sizes_that_are_told_of_them():
    def size(name: str) -> tuple[int, int]:
        params = list(WORKLOADS[name].make(torch.device("meta")).parameters())
        return sum(param.numel() for param in params), len(params)

    assert 25e6 < size("mlp")[0] < 26e6
    assert 10e6 < size("gpt")[0] < 12e6
    assert size("resnet-small")[1] > 300


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, "sgd") for name in VARIANTS if name not in ("none", "hvdlite-fp16", "hvdlite-tuned", "horovod")),
        *(
            (name, optimizer)
            for optimizer in OPTIMIZERS
            for name in ("ddp-zero", "hvdlite-shard")
            if optimizer != "sgd"
        ),
    ],
)
@pytest.mark.slow
def test_every_variant_takes_the_step_that_none_takes(name, optimizer):
    hvd.init()
    ranks = Ranks(current_world(), "cpu")
    try:
        torch.set_num_threads(1)
        workload = dataclasses.replace(WORKLOADS["resnet-small"], build=lambda: small_resnet(1))
        batch = workload.batch(2, 1, ranks.device)
        models = [workload.make(ranks.device, optimizer) for _ in range(2)]
        for variant, model in zip(("none", name), models, strict=True):
            training = VARIANTS[variant](ranks, model, OPTIMIZERS[optimizer])
            training.step(batch)
            training.close()
        for got, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    finally:
        del training
        ranks.close()


def test_only_matrices_are_trained_with_muon_and_the_variants_that_share_state_are_no_usual_ones():
    model = WORKLOADS["resnet-small"].make(torch.device("meta"), "muon")
    assert [param.shape for param in training.trained(model)] == [(10, 64)]
    assert {"ddp-zero", "hvdlite-shard"}.isdisjoint(StepComparison(None, None, None, 1)._variants)
    assert {"ddp-zero", "hvdlite-shard"}.isdisjoint(Memory("mlp", None, None, 1).cases[0].samples)


def test_what_a_cgroup_leaves_counts_too(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/job/step\n")

    def limit(path: str, most: str, taken: int) -> None:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / path / "memory.max").write_text(f"{most}\n")
        (tmp_path / path / "memory.current").write_text(f"{taken}\n")
        (tmp_path / path / "memory.stat").write_text("anon 1\ninactive_file 100\n")

    limit("root/job/step", "max", 10)
    assert free_in_cgroup(own, tmp_path / "root") == math.inf
    limit("root/job", "5000", 1000)
    assert free_in_cgroup(own, tmp_path / "root") == 4100
    limit("root/job/step", "300", 250)
    assert free_in_cgroup(own, tmp_path / "root") == 150
    assert free_in_cgroup(tmp_path / "none", tmp_path / "root") == math.inf


def test_hvdlite_under_the_name_of_horovod_is_not_measured_as_horovod(tmp_path, monkeypatch):
    shim = importlib.util.spec_from_file_location("horovod", hvd.__file__)
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: shim)
    with pytest.raises(ImportError, match="Horovod is not installed"):
        horovod_module()


def test_a_model_that_cannot_be_had_is_an_error_only_where_it_was_named(monkeypatch):
    def refuse(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist\nand so on")

    monkeypatch.setattr(training.importlib, "import_module", refuse)
    with pytest.raises(OptionError, match=r"^--models: resnet50 needs torchvision, which cannot be imported: operator"):
        StepComparison(["resnet50"], ["none"], None, 1)
    (skipped,) = StepComparison(None, ["none"], None, 1).report().data["skipped"]
    assert skipped["model"] == "resnet50"
    assert "nms does not exist" in skipped["why"]
    with pytest.raises(OptionError, match=r"^--model: resnet50 needs torchvision, which cannot be imported: operator"):
        Memory(model="resnet50")
