"""Lightning's Trainer with HvdliteStrategy, in real processes.

Each kind of job trains all scenarios of lightning_programs.py one after the other, and is run once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from copied_ranks import RankServer
from e2e.conftest import Launch
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.ops import reduction

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("lightning_programs.py")
Results = list[dict[str, Any]]

OF_DDP = ["plain", "accumulated", "clipped by norm", "resumed"]
EQUAL_TO_ONE_PROCESS = [
    "plain",
    "accumulated",
    "clipped by norm",
    "clipped by value",
    "resumed",
    "gan",
    "gan without toggling",
]


@pytest.fixture(autouse=True, scope="module")
def _needs_lightning() -> None:
    # Here, and not for the module: where only other tests are asked for, this is no skipped one.
    pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Results]]:
    """Provides a function that returns each rank's results of a kind of job."""
    done: dict[str, Results] = {}
    rank_server = RankServer(tmp_path_factory.mktemp("ranks"), ("lightning",))

    def results(kind: str, size: int) -> Results:
        if kind not in done:
            tmp = tmp_path_factory.mktemp(kind)
            words = ("-np", str(size), sys.executable, str(PROGRAM), kind, str(tmp / "results"))
            job = Launch(tmp, words, {}, None, program=rank_server.launcher(), cwd=tmp)
            try:
                code, out, err = job.ended()
            finally:
                job.kill_all()
            assert code == 0, (out + err).decode()
            done[kind] = [torch.load(tmp / f"results.{rank}", weights_only=True) for rank in range(size)]
        return done[kind]

    yield results
    rank_server.close()


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor], **tolerances: float) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerances)


@pytest.mark.night(but=2)
@pytest.mark.parametrize("scenario", EQUAL_TO_ONE_PROCESS)
def test_ranks_together_train_the_weights_of_one_process_on_the_whole_batch(trained, scenario):
    (one,) = trained("one", 1)
    for rank in trained("hvdlite", 2):
        assert_equal(rank[scenario]["weights"], one[scenario]["weights"], rtol=1e-4, atol=1e-6)


@pytest.mark.night(but=1)
@pytest.mark.parametrize("scenario", OF_DDP)
def test_lightnings_own_ddp_on_hvdlites_ranks_trains_the_weights_of_one_process(trained, scenario):
    (one,) = trained("one", 1)
    for rank in trained("ddp", 2):
        assert_equal(rank[scenario]["weights"], one[scenario]["weights"], rtol=1e-4, atol=1e-6)
        assert rank["plain"]["sizes"] == 2
        for kind in ("metrics", "tested"):
            assert rank["plain"][kind] == pytest.approx(one["plain"][kind], rel=1e-4)


def test_all_ranks_end_with_the_same_bits(trained):
    first, second = trained("hvdlite", 2)
    for scenario in first:
        if "weights" in first[scenario]:
            assert_equal(first[scenario]["weights"], second[scenario]["weights"], rtol=0, atol=0)


def test_compression_and_bfloat16_train_nearly_the_weights_of_one_process(trained):
    (one,) = trained("one", 1)
    for rank in trained("hvdlite", 2):
        assert_equal(rank["halved"]["weights"], one["halved"]["weights"], atol=2e-2, rtol=0)
        assert_equal(rank["mixed"]["weights"], one["mixed"]["weights"], atol=3e-2, rtol=0)


def test_each_rank_draws_its_share_of_the_samples(trained):
    first, second = (rank["plain"]["drawn"] for rank in trained("hvdlite", 2))
    assert first[:24] == list(range(0, 48, 2))
    assert second[:24] == list(range(1, 48, 2))
    shuffled = [rank["shuffled"]["drawn"] for rank in trained("hvdlite", 2)]
    for epoch in (slice(24), slice(24, 48)):
        assert sorted([*shuffled[0][epoch], *shuffled[1][epoch]]) == list(range(48))
    assert shuffled[0][:24] != shuffled[0][24:]


def test_metrics_are_those_of_all_ranks(trained):
    (one,) = trained("one", 1)
    for rank in trained("hvdlite", 2):
        for kind in ("metrics", "tested"):
            assert rank["plain"][kind] == pytest.approx(one["plain"][kind], rel=1e-4)


def test_passes_that_accumulate_are_not_averaged_until_the_last(trained):
    first, second = (rank["accumulated"] for rank in trained("hvdlite", 2))
    assert len(first["passes"]) == 12
    for number in (0, 1, 2, 4):  # in the first epoch the passes 3 and 5 are followed by a step
        assert not torch.equal(first["passes"][number], second["passes"][number])
    assert len(first["averages"]) == 4
    assert_equal(first["averages"], second["averages"], rtol=0, atol=0)


@pytest.mark.parametrize("scenario", ["clipped by norm", "clipped by value"])
def test_hooks_before_the_step_see_the_averages_of_all_ranks(trained, scenario):
    (one,) = trained("one", 1)
    for rank in trained("hvdlite", 2):
        assert_equal(rank[scenario]["averages"], one[scenario]["averages"], rtol=1e-3, atol=1e-6)


def test_a_resumed_job_goes_on_with_the_state_of_rank_0s_checkpoint(trained):
    (one,) = trained("one", 1)
    for rank in trained("hvdlite", 2):
        assert rank["resumed"]["files"] == one["resumed"]["files"]
        for number, state in one["resumed"]["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(rank["resumed"]["state"][number][key], value, rtol=1e-3, atol=1e-6)


def test_synchronized_batch_normalization_equals_one_process_and_leaves_plain_layers(trained):
    (one,) = trained("one", 1)
    for rank in trained("hvdlite", 2):
        # Without the bias before the normalization, whose gradient is rounding errors alone.
        mine, others = ([*each["normalized"]["weights"]] for each in (rank, one))
        assert_equal([mine[0], *mine[2:]], [others[0], *others[2:]], rtol=1e-3, atol=1e-4)
        # Without the running mean, which that bias is a part of.
        assert_equal(rank["normalized"]["buffers"][1:], one["normalized"]["buffers"][1:], rtol=1e-3, atol=1e-4)
        assert rank["normalized"]["layer"] == "BatchNorm1d"


def test_the_strategys_collectives_are_over_all_ranks(trained):
    for rank in trained("hvdlite", 2):
        assert rank["collectives"] == {
            "mean": 0.5,
            "sum": 1.0,
            "broadcast": {"from": 0.0},
            "gathered": [[0.0], [1.0]],
            "all": False,
            "any": True,
        }


def test_a_mean_of_integers_is_lightnings_own_and_no_warning(caplog):
    from hvdlite.lightning import HvdliteStrategy  # noqa: PLC0415  # it needs Lightning

    def rank(own: int) -> list[float]:
        reduce = partial(HvdliteStrategy.reduce, None)
        tensors = [torch.tensor([7 + own], dtype=dtype) for dtype in (torch.int64, torch.uint8, torch.float32)]
        tensors.append(torch.tensor([200 + own], dtype=torch.uint8))  # of which the sum has no room
        return [reduce(tensor, reduce_op="mean").item() for tensor in tensors]

    reduction._warned_of_integers.clear()
    assert run_worlds(2, rank) == [[7, 7, 7.5, 200]] * 2
    assert not reduction._warned_of_integers.is_set()
    assert caplog.records == []


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_an_optimizer_that_the_program_has_wrapped_steps_by_its_own_arguments(op, monkeypatch):
    from hvdlite.lightning import HvdliteStrategy  # noqa: PLC0415  # it needs Lightning

    def step(strategy: Any, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any) -> Any:
        return optimizer.step(closure)

    monkeypatch.setattr(HvdliteStrategy.__mro__[1], "optimizer_step", step)

    def rank(own: int) -> list[float]:
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op=op)

        def closure() -> torch.Tensor:
            loss = param.sum()
            loss.backward()
            return loss

        HvdliteStrategy().optimizer_step(optimizer, closure)
        return param.tolist()

    assert run_worlds(2, rank) == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("name", ["backward_passes_per_step", "named_parameters", "step_on_arrival", "lr"])
def test_arguments_that_are_not_the_optimizers_or_not_the_users_are_refused(name):
    from hvdlite.lightning import HvdliteStrategy  # noqa: PLC0415  # it needs Lightning

    with pytest.raises(TypeError, match=name):
        HvdliteStrategy(**{name: 1})


def test_a_module_of_the_programs_own_with_the_name_of_lightning_is_not_taken_for_it(rank_server, tmp_path):
    (tmp_path / "lightning.py").write_text("")
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport hvdlite.lightning as own\nprint(own._PYTORCH)"
    words = [sys.executable, *rank_server.python(), "-c", program]
    said = subprocess.run(words, check=True, capture_output=True, timeout=200, text=True)
    assert said.stdout.endswith("pytorch_lightning\n")


def test_without_lightning_the_import_says_how_to_install_it(rank_server):
    program = (
        "import sys, hvdlite\nassert not {'lightning', 'pytorch_lightning'} & sys.modules.keys()\n"
        "sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "try:\n    import hvdlite.lightning\nexcept ImportError as error:\n    print(error)"
    )
    words = [sys.executable, *rank_server.python(), "-c", program]
    said = subprocess.run(words, check=True, capture_output=True, timeout=200, text=True)
    assert said.stdout.endswith("which is not installed: pip install lightning\n")
