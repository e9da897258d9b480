"""A rank is lost in a step with a codec: the others go on as a job of their own would from the state before the step.

Each step is compared with one of a job that has had these ranks alone from its start, and that has loaded what they had
before the step. It has nothing of ``--survive``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from equal_states import assert_same
from fake_hosts import on
from ranks import set_of
from survivors import Death, Unheard, run_survivors
from torch import Tensor, nn

import hvdlite as hvd
from hvdlite.comm.group import Group

STEPS = 6
LOST_IN = 3
# All points of a step, in order, and whether the gradients of a rank that is lost there are in the step's averages.
POINTS = {"begin": False, "backward": False, "synchronize": False, "vote": False, "voted": True, "stepped": True}

FORMS = {
    "int8": hvd.Compression.int8,
    "int4": hvd.Compression.int4,
    "topk": hvd.Compression.topk(0.05),
    "powersgd": hvd.Compression.powersgd(rank=2, start_step=2),
}
# Residuals of int4 are kept as those of int8.
each_form = pytest.mark.parametrize("name", ["int8", "topk", "powersgd", pytest.param("int4", marks=pytest.mark.slow)])

SHAPES = [(40, 30), (300,), (20, 25)]


def gradient(rank: int, step: int, number: int) -> Tensor | None:
    """A rank's gradient of a parameter in a step. There is none of the second one now and then."""
    if number == 1 and (rank + step) % 3 == 0:
        return None
    return torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(100 * rank + 10 * step + number))


class Training:
    """The training of one rank, with what it had before and after each of its steps."""

    def __init__(self, rank: int, name: str, **options: Any) -> None:
        self.rank = rank
        self.params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        inner = torch.optim.SGD(self.params, lr=1.0)
        named = [(f"p{number}", param) for number, param in enumerate(self.params)]
        options = {"bucket_cap_mb": 0.002, **options}
        self.optimizer = hvd.DistributedOptimizer(inner, named, compression=FORMS[name], **options)
        # By step: the parameters and the optimizer's state.
        self.before: dict[int, tuple[list[Tensor], Any]] = {}
        self.after: dict[int, tuple[list[Tensor], Any]] = {}

    def load(self, found: tuple[list[Tensor], Any]) -> None:
        for param, value in zip(self.params, found[0], strict=True):
            param.data.copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(found[1]))

    def state(self) -> tuple[list[Tensor], Any]:
        return [param.detach().clone() for param in self.params], copy.deepcopy(self.optimizer.state_dict())

    def take_step(self, step: int) -> None:
        self.before[step] = self.state()
        self.optimizer.zero_grad()
        given = [(param, gradient(self.rank, step, number)) for number, param in enumerate(self.params)]
        sum((param * each).sum() for param, each in given if each is not None).backward()
        self.optimizer.step()
        self.after[step] = self.state()


def residuals_of(state: Any) -> dict[str, dict[str, tuple[int, float, Tensor]]]:
    return state.get("hvdlite", {}).get("exchange", {}).get("residuals", {})


def kept_of(state: Any) -> list[Tensor]:
    """All that a rank has kept of each gradient, whichever part of it is whose."""
    totals = []
    for number, shape in enumerate(SHAPES):
        total = torch.zeros(shape).view(-1)
        for start, scale, values in residuals_of(state).get(f"p{number}", {}).values():
            assert scale == 1.0
            total[start : start + len(values)] += values
        totals.append(total.view(shape))
    return totals


def trained(monkeypatch, hosts, name, *deaths, **options) -> tuple[dict[int, Training], list[int]]:
    """Returns all ranks' trainings, and the ranks that are left."""
    trainings: dict[int, Training] = {}

    def program(rank: int) -> None:
        training = trainings[rank] = Training(rank, name)
        for step in range(STEPS):
            training.take_step(step)

    return trainings, list(run_survivors(monkeypatch, hosts, program, *deaths, **options))


def require_those_of_a_job_of_their_own(trainings, left, hosts, name, first: int) -> None:
    """All steps from the first are those of a job of the ranks that are left, from their state before it."""

    def rank(group: Group) -> Training:
        number = left[group.rank]
        training = Training(number, name, process_set=set_of(group))
        training.load(trainings[number].before[first])
        for step in range(first, STEPS):
            training.take_step(step)
        training.optimizer.close()
        return training

    fresh = on([hosts[number] for number in left], rank, engine="shared memory")
    for number, expected in zip(left, fresh, strict=True):
        for step in range(first, STEPS):
            assert_same(trainings[number].after[step], expected.after[step])


def require_that_nothing_is_lost(trainings, ranks_of_steps: dict[int, list[int]]) -> None:
    """What the parameters got, and what is kept, is what was given and what these ranks had kept before."""
    for step, ranks in ranks_of_steps.items():
        before, after = ([getattr(trainings[rank], at)[step] for rank in ranks] for at in ("before", "after"))
        for number in range(len(SHAPES)):
            for each in after:
                assert torch.equal(each[0][number], after[0][0][number]), "the ranks differ in bits"
            sent = (before[0][0][number] - after[0][0][number]) * len(ranks)
            given = [gradient(rank, step, number) for rank in ranks]
            total = sum(each for each in given if each is not None)
            kept_before, kept_after = (sum(kept_of(each[1])[number] for each in found) for found in (before, after))
            torch.testing.assert_close(sent + kept_after, total + kept_before, rtol=0, atol=1e-4)


@pytest.mark.night(but=12)
@pytest.mark.slow(but=3)
@each_form
@pytest.mark.parametrize("point", POINTS)
def test_the_others_go_on_as_a_job_of_their_own_from_the_residuals_before_the_step(monkeypatch, point, name):
    hosts = ["a", "b", "c"]
    trainings, left = trained(monkeypatch, hosts, name, Death(1, point, LOST_IN))
    assert left == [0, 2]
    first = LOST_IN + POINTS[point]
    assert kept_of(trainings[0].before[first][1])[0].any()
    require_those_of_a_job_of_their_own(trainings, left, hosts, name, first)
    steps = {step: [0, 1, 2] if step < LOST_IN else left for step in range(STEPS) if not LOST_IN <= step < first}
    require_that_nothing_is_lost(trainings, steps)


@pytest.mark.night(but=14)
@pytest.mark.slow
@each_form
@pytest.mark.parametrize(
    ("hosts", "lost"),
    [
        (["a", "b", "c"], 0),
        (["a", "b", "c"], 2),
        (["a", "b", "c", "d"], 1),
        # Shards become whole buckets, as the hosts come to have different numbers of ranks.
        (["a", "a", "b", "b"], 0),
        (["a", "a", "b", "b"], 3),
        # Whole buckets become shards: what a rank had of another's shard is summed within the host.
        (["a", "a", "b", "b", "b"], 4),
        (["a", "b", "b"], 1),
    ],
)
def test_on_other_shards_and_hosts_the_bits_are_equal_and_what_the_others_had_kept_is_sent(
    monkeypatch, hosts, lost, name
):
    trainings, left = trained(monkeypatch, hosts, name, Death(lost, "vote", LOST_IN))
    assert left == [rank for rank in range(len(hosts)) if rank != lost]
    require_those_of_a_job_of_their_own(trainings, left, hosts, name, LOST_IN)
    everybody = list(range(len(hosts)))
    require_that_nothing_is_lost(trainings, {step: everybody if step < LOST_IN else left for step in range(STEPS)})


@each_form
def test_where_a_rank_has_not_heard_of_the_vote_it_has_the_residuals_after_the_step_like_the_others(monkeypatch, name):
    hosts = ["a", "b", "c"]
    trainings, left = trained(monkeypatch, hosts, name, Death(0, "voted", LOST_IN), unheard=[Unheard(2, LOST_IN)])
    undisturbed, _ = trained(monkeypatch, hosts, name)
    for rank in left:
        assert_same(trainings[rank].after[LOST_IN], undisturbed[rank].after[LOST_IN])
    require_those_of_a_job_of_their_own(trainings, left, hosts, name, LOST_IN + 1)


@pytest.mark.night(but=5)
@pytest.mark.slow(but=2)
@each_form
@pytest.mark.parametrize("point", ["backward", "vote"])
def test_a_discarded_step_changes_no_residual(monkeypatch, point, name):
    hosts = ["a", "b", "c"]
    trainings, left = trained(
        monkeypatch, hosts, name, Death(1, point, LOST_IN), cannot_repeat={"cpu": "the engine of this test"}
    )
    for rank in left:
        assert_same(trainings[rank].after[LOST_IN], trainings[rank].before[LOST_IN])
    require_those_of_a_job_of_their_own(trainings, left, hosts, name, LOST_IN + 1)


@pytest.mark.night(but=5)
@pytest.mark.slow(but=2)
@each_form
@pytest.mark.parametrize("deaths", [((0, 2), (3, 3)), ((0, 3), (3, 3))])
def test_several_ranks_may_be_lost_one_after_the_other_and_in_the_same_step(monkeypatch, deaths, name):
    hosts = ["a", "b", "c", "d"]
    lost = [Death(rank, point, step) for (rank, step), point in zip(deaths, ("backward", "vote"), strict=True)]
    trainings, left = trained(monkeypatch, hosts, name, *lost)
    assert left == [1, 2]
    require_those_of_a_job_of_their_own(trainings, left, hosts, name, LOST_IN)


@each_form
@pytest.mark.parametrize(("hosts", "lost"), [(["a", "b"], 0), (["a", "a", "b"], 2)])
def test_ranks_of_one_host_send_all_and_keep_what_they_had(monkeypatch, hosts, lost, name):
    trainings, left = trained(monkeypatch, hosts, name, Death(lost, "vote", LOST_IN))
    for step in range(LOST_IN, STEPS):
        require_that_nothing_is_lost(trainings, {step: left})
        for rank in left:
            kept, before = (kept_of(trainings[rank].after[at][1]) for at in (step, LOST_IN - 1))
            assert kept[0].any()
            assert_same(kept, before)


@pytest.mark.night(but=5)
@pytest.mark.slow(but=2)
@each_form
@pytest.mark.parametrize(("hosts", "who"), [(["a", "b", "c"], "rank 1 (b)"), (["a", "a", "b", "b"], "rank 1 (a)")])
def test_one_line_names_the_lost_rank_whose_residual_is_lost(monkeypatch, caplog, hosts, who, name):
    trained(monkeypatch, hosts, name, Death(1, "vote", LOST_IN))
    (line,) = [each.getMessage() for each in caplog.records if "residual" in each.getMessage()]
    assert line == (
        f"survive: the residual of {who} is lost: what compression={FORMS[name]!r} had not sent yet of its gradients "
        "(optimizer 1)"
    )


def test_before_anything_was_encoded_no_residual_is_lost(monkeypatch, caplog):
    trained(monkeypatch, ["a", "b", "c"], "powersgd", Death(1, "vote", 1))
    trained(monkeypatch, ["a", "a", "a"], "int8", Death(1, "vote", LOST_IN))
    assert not [each for each in caplog.records if "residual" in each.getMessage()]


def test_residuals_are_copied_only_where_a_step_may_be_taken_back(monkeypatch):
    def rank(group: Group) -> None:
        training = Training(group.rank, "int8", process_set=set_of(group))
        for step in range(3):
            training.take_step(step)
        residuals = training.optimizer._reducer.step.plan.exchange._residuals
        assert residuals._of
        assert not residuals._copies
        assert not residuals._free

    on("2 hosts", rank, engine="shared memory")


def states_on_uneven_hosts(name: str) -> list[Any]:
    def rank(group: Group) -> Any:
        training = Training(group.rank, name, process_set=set_of(group))
        for step in range(3):
            training.take_step(step)
        return training.optimizer.state_dict()

    return on(["a", "a", "b", "b", "b"], rank, engine="shared memory")


@each_form
def test_what_a_rank_has_of_the_shard_of_another_waits_for_a_step_with_a_finite_gradient(name):
    states = states_on_uneven_hosts(name)
    given = torch.randn(1200, generator=torch.Generator().manual_seed(7))

    def go_on(group: Group) -> Any:
        training = Training(group.rank, name, process_set=set_of(group))
        training.optimizer.load_state_dict(copy.deepcopy(states[group.rank]))
        found = []
        for factor in (None, float("inf"), 1.0):
            training.optimizer.zero_grad()
            training.params[1].grad = torch.zeros(SHAPES[1])
            if factor is not None:
                training.params[0].grad = (given * factor).view(SHAPES[0])
            training.optimizer.synchronize()
            grad = training.params[0].grad
            found.append((None if grad is None else grad.clone(), training.optimizer.state_dict()))
        return found

    for step, found in enumerate(zip(*on(["a", "a", "b", "b"], go_on, engine="shared memory"), strict=True)):
        kinds = {kind for _, state in found for kind in residuals_of(state).get("p0", ())}
        assert ("rest" in kinds) == (step < 2)
        kept = sum(kept_of(state)[0] for _, state in found)
        before = sum(kept_of(state)[0] for state in states[:4])
        if step == 0:
            assert found[0][0] is None
            assert torch.allclose(kept, before, rtol=0, atol=1e-5)
        elif step == 1:
            assert not found[0][0].isfinite().all()
            assert kept.isfinite().all()
        else:
            sent = found[0][0].view(-1) * 4
            assert torch.allclose(sent + kept.view(-1), 4 * given + before.view(-1), rtol=0, atol=1e-4)


@each_form
def test_what_waits_for_another_rank_stays_with_an_infinity_elsewhere_and_is_not_kept_twice(name):
    states = states_on_uneven_hosts(name)

    def go_on(group: Group) -> Any:
        training = Training(group.rank, name, bucket_cap_mb=None, process_set=set_of(group))
        training.optimizer.load_state_dict(copy.deepcopy(states[group.rank]))
        for number, param in enumerate(training.params):
            param.grad = torch.zeros(SHAPES[number])
        # In the parts of both ranks of a host.
        for param in training.params[:: len(training.params) - 1]:
            param.grad.view(-1)[[0, -1]] = float("inf")
        training.optimizer.synchronize()
        return [param.grad for param in training.params], training.optimizer.state_dict()

    found = on(["a", "a", "b", "b"], go_on, engine="shared memory")
    kept = [sum(parts) for parts in zip(*(kept_of(state) for _, state in found), strict=True)]
    before = [sum(parts) for parts in zip(*(kept_of(state) for state in states[:4]), strict=True)]
    for grads, after, expected in zip(zip(*(grads for grads, _ in found), strict=True), kept, before, strict=True):
        # int8 and int4 take a step in the other blocks.
        stays = ~grads[0].isfinite() if name.startswith("int") else torch.ones_like(after, dtype=torch.bool)
        assert torch.allclose(after[stays], expected[stays], rtol=0, atol=1e-5)
    rests = [residuals_of(state)["p0"]["rest"] for _, state in found if "rest" in residuals_of(state)["p0"]]
    assert rests
    for start, _, values in rests:
        is_finite = found[0][0][0].view(-1)[start : start + len(values)].isfinite()
        assert is_finite.any() == name.startswith("int")
        assert not values[is_finite].any()
