"""Checkpoints: rank 0 alone writes and reads the file, all ranks get its state, and all ranks raise its errors."""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

import pytest
import torch
from torch import nn
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.optim import checkpoint


class Versioned(nn.Linear):
    """A module whose states have a version, which it looks at when it loads one."""

    _version = 3
    loaded_version: int | None = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.loaded_version = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Training:
    """What one rank trains, begun with numbers of its own."""

    def __init__(self, seed: int, wraps: bool = True, features: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(Versioned(features, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        for param in self.model.parameters():
            param.data = torch.randn(param.shape, generator=generator)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.1 * (1 + seed))
        self.optimizer: Any = self.inner
        if wraps:
            self.optimizer = hvd.DistributedOptimizer(self.inner, self.model.named_parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.inner, T_max=10 + seed)
        self.average = nn.Linear(2, 2)
        self.average.weight.data.fill_(float(seed))

    def step(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.full_like(param, 0.5)
        self.optimizer.step()
        self.scheduler.step()

    @property
    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "average": self.average,
        }

    def values(self) -> str:
        states = [each.state_dict() for each in (self.model, self.inner, self.scheduler, self.average)]
        return repr(states)


def save(path: Any, size: int = 2, seed: int = 0, **mine: Any) -> str:
    """Saves a checkpoint of so many ranks; returns what it has, as text."""

    def rank(own: int) -> str:
        training = Training(seed, wraps=False)
        training.step()
        hvd.save_checkpoint(path if own == 0 else "/no/such/directory", **training.objects, **mine)
        return training.values()

    return run_worlds(size, rank)[0]


@pytest.mark.parametrize("wraps", [True, False])
def test_all_ranks_go_on_with_what_rank_0_has_saved_and_only_it_needs_the_file(tmp_path, wraps):
    path = tmp_path / "checkpoint.pt"
    own_value = torch.arange(3.0)
    expected = save(path, epoch=7, best={"loss": 0.5, "at": [1, (2, None)]}, mean=own_value)

    def rank(own: int) -> Any:
        training = Training(5 + own, wraps)
        there = path if own == 0 else "/no/such/directory"
        rest = hvd.load_checkpoint(there, **training.objects)
        assert training.model[0].loaded_version == 3
        found = training.values(), rest
        training.step()
        return found

    for values, rest in run_worlds(2, rank):
        assert values == expected
        assert torch.equal(rest.pop("mean"), own_value)
        assert rest == {"epoch": 7, "best": {"loss": 0.5, "at": [1, (2, None)]}, "size": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint.pt"]
    # PyTorch alone reads it, too.
    assert torch.load(path, weights_only=True)["epoch"] == 7


def test_with_another_number_of_ranks_rank_0_warns_once_and_names_what_may_depend_on_it(tmp_path, caplog):
    path = tmp_path / "checkpoint.pt"
    save(path, 2, epoch=1)
    caplog.set_level(logging.WARNING, "hvdlite")
    for size, words in ((3, "there are 3"), (1, "there is 1"), (2, None)):
        caplog.clear()
        run_worlds(size, lambda own: hvd.load_checkpoint(path, **Training(own, wraps=False).objects))
        found = [each.getMessage() for each in caplog.records]
        assert len(found) == (words is not None)
        for each in found:
            assert f"was saved by 2 ranks, and {words}. " in each
            assert "optimizer: lr 0.0975" in each
            assert "scheduler: base_lrs [0.1], T_max 10, last_epoch 1." in each


def test_a_file_that_says_nothing_of_ranks_is_loaded_as_it_is(tmp_path, caplog):
    torch.save({"model": nn.Linear(2, 2).state_dict(), "epoch": 3}, tmp_path / "old.pt")
    found = run_worlds(2, lambda _: hvd.load_checkpoint(tmp_path / "old.pt", model=nn.Linear(2, 2)))
    assert found == [{"epoch": 3, "size": None}] * 2
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


class Code:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (None, FileNotFoundError, "No such file or directory"),
        (b"no checkpoint", ValueError, "is no checkpoint"),
        (b"PK\x03\x04 cut off", ValueError, "is no checkpoint"),
        (b"", ValueError, "is no checkpoint"),
        ([1, 2], ValueError, "it has a list, and not a dict"),
        ({"model": {}}, ValueError, "has no 'epoch_of'; it has model"),
        ({"model": {}, "epoch_of": Code()}, ValueError, "and values alone: it has "),
    ],
)
def test_a_file_that_is_none_is_an_error_in_words_on_every_rank(tmp_path, monkeypatch, content, kind, words):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    outcomes = attempt_worlds(2, lambda _: hvd.load_checkpoint(path, model=nn.Module(), epoch_of=nn.Module()))
    for outcome in outcomes:
        assert isinstance(outcome, kind), outcome
        assert words in str(outcome)
        assert str(path) in str(outcome)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_an_error_that_says_so(tmp_path, part):
    path = tmp_path / "checkpoint.pt"
    save(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    for outcome in attempt_worlds(2, lambda own: hvd.load_checkpoint(path, model=nn.Module())):
        assert isinstance(outcome, ValueError), outcome
        assert f"{path} is no checkpoint, or was cut off" in str(outcome)


@pytest.mark.parametrize(
    "value", [lambda: 1, nn.Linear, (each for each in "ab")], ids=["function", "class", "iterator"]
)
def test_a_value_that_cannot_be_saved_is_an_error_that_names_it(tmp_path, value):
    outcomes = attempt_worlds(2, lambda own: hvd.save_checkpoint(tmp_path / "checkpoint.pt", epoch=1, schedule=value))
    for outcome in outcomes:
        assert isinstance(outcome, Exception), outcome
        assert "save_checkpoint: schedule " in str(outcome)
    assert isinstance(outcomes[0], TypeError)
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_on_one_rank_is_an_error_on_all_that_names_it(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save(path)

    def other_shapes(own: int) -> None:
        hvd.load_checkpoint(path, model=Training(0, wraps=False, features=3 + own).model)

    def other_groups(own: int) -> None:
        params = [nn.Parameter(torch.zeros(1)) for _ in range(6)]
        optimizer = torch.optim.SGD([{"params": params[:3]}, {"params": params[3:]}] if own else params)
        hvd.load_checkpoint(path, optimizer=optimizer)

    for function, words in ((other_shapes, "size mismatch for 0.weight"), (other_groups, "parameter group")):
        outcomes = attempt_worlds(2, function)
        assert len({str(each) for each in outcomes}) == 1
        for outcome in outcomes:
            assert isinstance(outcome, hvd.MismatchError), outcome
            assert "does not fit on rank 1" in str(outcome)
            assert words in str(outcome)


def test_ranks_that_load_different_names_are_an_error_on_all(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save(path)
    outcomes = attempt_worlds(2, lambda own: hvd.load_checkpoint(path, **({"average": nn.Linear(2, 2)} if own else {})))
    assert all(isinstance(each, hvd.MismatchError) for each in outcomes), outcomes


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank_and_the_one_before_stays(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    save(path, epoch=1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullDisk(checkpoint._Recording):
        def write(self, data: Any) -> int:
            return super().write(data) if self._file.tell() < 1000 else self._full(data)

        def _full(self, data: Any) -> int:
            self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115  # for the rest of the test
            return super().write(data)

    for name, replaced in (("os.fsync", full), ("_Recording", FullDisk)):
        with monkeypatch.context() as patch:
            patch.setattr(f"hvdlite.optim.checkpoint.{name}", replaced)
            outcomes = attempt_worlds(2, lambda _: hvd.save_checkpoint(path, epoch=2, values=torch.zeros(100_000)))
        for outcome in outcomes:
            assert isinstance(outcome, OSError), outcome
            assert (outcome.errno, outcome.filename) == (errno.ENOSPC, str(path))
        assert torch.load(path, weights_only=True)["epoch"] == 1
        assert os.listdir(tmp_path) == ["checkpoint.pt"]
    for outcome in attempt_worlds(2, lambda _: hvd.save_checkpoint(tmp_path / "none" / "checkpoint.pt", epoch=2)):
        assert isinstance(outcome, FileNotFoundError), outcome
        assert str(tmp_path / "none" / "checkpoint.pt") in str(outcome)


def test_a_value_that_could_not_be_loaded_is_an_error_when_it_is_saved(tmp_path):
    path = tmp_path / "checkpoint.pt"
    for outcome in attempt_worlds(2, lambda _: hvd.save_checkpoint(path, model=nn.Linear(1, 1), settings=Training)):
        assert isinstance(outcome, TypeError), outcome
        assert "save_checkpoint: settings cannot be saved, or not be loaded safely: it has " in str(outcome)
        assert "Training, which could run any code: save tensors, numbers" in str(outcome)
    assert os.listdir(tmp_path) == []


def test_what_is_wrong_with_the_arguments_is_said_before_anything_is_done(tmp_path):
    for name in ("size", "hvdlite"):
        for outcome in attempt_worlds(2, lambda _, name=name: hvd.save_checkpoint(tmp_path / "x", **{name: 1})):
            assert isinstance(outcome, ValueError)
            assert f"the name '{name}' is taken" in str(outcome)
    for outcome in attempt_worlds(2, lambda _: hvd.load_checkpoint(tmp_path / "x", epoch=0)):
        assert isinstance(outcome, TypeError)
        assert "epoch, a int, has no load_state_dict" in str(outcome)
    with pytest.raises(hvd.NotInitializedError):
        hvd.save_checkpoint(tmp_path / "x", epoch=0)


def test_a_link_stays_one_and_what_a_killed_process_left_is_no_hindrance(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.pt").symlink_to(tmp_path / "real" / "checkpoint.pt")
    (tmp_path / "real" / "checkpoint.pt.tmp").write_text("half")
    run_worlds(1, lambda _: hvd.save_checkpoint(tmp_path / "link.pt", epoch=4))
    assert (tmp_path / "link.pt").is_symlink()
    assert os.listdir(tmp_path / "real") == ["checkpoint.pt"]
    assert run_worlds(1, lambda _: hvd.load_checkpoint(tmp_path / "link.pt")) == [{"epoch": 4, "size": 1}]


def test_states_that_differ_by_rank_are_consolidated_for_the_rank_that_writes(tmp_path):
    calls = []

    class Own:
        def __init__(self, own: int) -> None:
            self.own = own

        def consolidate_state_dict(self, to: int) -> None:
            calls.append((self.own, to))

        def state_dict(self) -> dict[str, int]:
            return {"of": self.own}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.own = state["of"]

    path = tmp_path / "checkpoint.pt"
    run_worlds(2, lambda own: hvd.save_checkpoint(path, optimizer=Own(own)))
    assert sorted(calls) == [(0, 0), (1, 0)]


def test_the_ranks_of_a_process_set_save_and_load_without_the_others(tmp_path):
    path = tmp_path / "checkpoint.pt"

    def rank(own: int) -> Any:
        some = hvd.add_process_set([1, 2])
        found = None
        if own != 0:
            hvd.save_checkpoint(path, process_set=some, first=own)
            found = hvd.load_checkpoint(path, process_set=some)
        hvd.barrier()
        return found

    assert run_worlds(3, rank) == [None, {"first": 1, "size": 2}, {"first": 1, "size": 2}]


def test_the_recipe_for_other_ranks_continues_the_schedule_at_its_place_with_the_new_learning_rate(tmp_path):
    path, steps, size = tmp_path / "checkpoint.pt", 40, 2

    def trained(size: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1 * size)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps // size)

    def steps_of(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def begin(_: int) -> None:
        optimizer, scheduler = trained(size)
        steps_of(optimizer, scheduler, 8)
        hvd.save_checkpoint(path, optimizer=optimizer, scheduler=scheduler)

    def go_on(_: int) -> list[float]:
        optimizer, scheduler = trained(size)
        saved = hvd.load_checkpoint(path, optimizer=optimizer, scheduler=scheduler)
        factor = hvd.size() / saved["size"]
        for group in optimizer.param_groups:
            group["lr"] *= factor
            group["initial_lr"] *= factor
        scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
        scheduler.T_max = round(scheduler.T_max / factor)
        scheduler.last_epoch = round(scheduler.last_epoch / factor)
        return steps_of(optimizer, scheduler, 6)

    run_worlds(size, begin)
    (found, *_) = run_worlds(4, go_on)
    optimizer, scheduler = trained(4)
    assert found == pytest.approx(steps_of(optimizer, scheduler, 10)[4:])


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvd.Compression.int4},
        {"compression": hvd.Compression.topk(0.1)},
        {"compression": hvd.Compression.powersgd(rank=1, start_step=0, min_ratio=1.0)},
        {"outer": hvd.DiLoCo(sync_every=2, compression=hvd.Compression.int4)},
    ],
    ids=["int4", "topk", "powersgd", "DiLoCo"],
)
def test_what_a_compression_or_outer_steps_have_kept_is_loaded_on_all_ranks(tmp_path, options):
    path = tmp_path / "checkpoint.pt"

    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(40, 30)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, hvd.DistributedOptimizer(inner, model.named_parameters(), **options)

    def save_after_steps(own: int) -> None:
        model, optimizer = make()
        hvd.broadcast_parameters(model.state_dict())
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * own + step))
            model(x).square().mean().backward()
            optimizer.step()
        hvd.save_checkpoint(path, model=model, optimizer=optimizer)

    def load(_: int) -> Any:
        model, optimizer = make()
        hvd.load_checkpoint(path, model=model, optimizer=optimizer)
        kept = optimizer.state_dict()["hvdlite"]
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
        return kept

    run_worlds(2, save_after_steps)
    saved = torch.load(path, weights_only=True)["optimizer"]["hvdlite"]
    assert saved
    for size in (2, 3):
        for kept in run_worlds(size, load):
            assert kept.keys() == saved.keys()
