"""Settings and ranks say which kind of step an optimizer has; a new world makes a new one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import attempt_ranks
from survivors import Death, run_survivors
from torch import nn
from training import take_steps, wrap
from worlds import run_generations

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.steps.adasum_step import AdasumStep
from hvdlite.steps.averaged_step import AveragedStep
from hvdlite.steps.outer_step import OuterStep
from hvdlite.steps.surviving_step import SurvivingStep


@pytest.mark.parametrize(
    ("hosts", "options", "kind"),
    [
        (["a", "b"], {}, AveragedStep),
        (["a", "b"], {"compression": hvd.Compression.int8}, AveragedStep),
        (["a", "b"], {"op": hvd.Adasum}, AdasumStep),
        (["a", "b"], {"outer": hvd.LocalSGD(sync_every=2)}, OuterStep),
        (["a", "a"], {"outer": hvd.LocalSGD(sync_every=2)}, AveragedStep),
    ],
    ids=str,
)
def test_each_kind_of_step_is_made_for_its_settings(hosts, options, kind):
    def rank(group: Group) -> type:
        return type(wrap(group, [nn.Parameter(torch.zeros(2))], **options)._reducer.step)

    assert attempt_ranks(2, rank, hosts=hosts) == [kind] * 2


def test_steps_survive_in_a_world_where_they_may(monkeypatch):
    def program(rank: int) -> type:
        param = nn.Parameter(torch.zeros(2))
        return type(hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))._reducer.step)

    assert run_survivors(monkeypatch, ["a", "b"], program) == {0: SurvivingStep, 1: SurvivingStep}


def test_steps_of_ranks_that_share_the_optimizers_state_do_not_survive_and_so_of_all_optimizers(monkeypatch, caplog):
    def program(rank: int) -> type:
        param = nn.Parameter(torch.ones(64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0, momentum=0.9), shard="world")
        others = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
        with pytest.raises(ValueError, match=r"--survive, .* optimizers with shard= and others without"):
            hvd.DistributedOptimizer(others)
        take_steps(optimizer, lambda _: param.sum(), range(1))
        with pytest.raises(hvd.CommunicationError):
            take_steps(optimizer, lambda _: param.sum(), range(1))
        return type(optimizer._reducer.step)

    kinds = run_survivors(monkeypatch, ["a", "a", "a"], program, Death(1, "synchronize", 1))
    assert kinds == {0: AveragedStep, 2: AveragedStep}
    (line,) = [each.getMessage() for each in caplog.records if "do not go on" in each.getMessage()]
    assert "steps of optimizer 1 (SGD, shard='world')" in line
    assert "go back to the last commit of hvd.elastic.run" in line


def test_no_optimizer_shares_its_state_beside_one_that_survives(monkeypatch):
    def program(rank: int) -> None:
        first, second = (torch.optim.SGD([nn.Parameter(torch.zeros(2))]) for _ in range(2))
        kept = hvd.DistributedOptimizer(first)
        with pytest.raises(ValueError, match=r"--survive, .* optimizers with shard= and others without"):
            hvd.DistributedOptimizer(second, shard="host")
        assert isinstance(kept._reducer.step, SurvivingStep)

    run_survivors(monkeypatch, ["a", "a"], program)


def test_an_optimizer_that_could_not_be_wrapped_decides_about_no_other(monkeypatch):
    def program(rank: int) -> type:
        inner = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
        with pytest.raises(ValueError, match="groups should be"):
            hvd.DistributedOptimizer(inner, groups=-1, shard="host")
        return type(hvd.DistributedOptimizer(inner)._reducer.step)

    assert run_survivors(monkeypatch, ["a", "a"], program) == {0: SurvivingStep, 1: SurvivingStep}


def test_the_step_of_a_new_world_is_another_with_the_same_parameters():
    def rank(generations: Iterator[int]) -> list[float]:
        param, optimizer, steps = nn.Parameter(torch.zeros(2)), None, []
        for _ in generations:
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("weight", param)])
            take_steps(optimizer, lambda _: (param * (hvd.rank() + 1.0)).sum(), range(1))
            steps.append(optimizer._reducer.step)
        first, second = steps
        assert first is not second
        assert [list(each.params) for each in second.plan.added] == [["weight"]]
        return param.tolist()

    assert run_generations([2, 2], rank) == [[-3.0, -3.0]] * 2
