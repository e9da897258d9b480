"""A user's exchange gets gradients and links between ranks, and its state is saved and loaded with the optimizer's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from ranks import attempt_ranks, counting, run_ranks
from torch import Tensor, nn
from training import wrap
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.comm.work import Work


class ScaledSigns(hvd.Exchange):
    """Sends the sign of each number and a scale per parameter; the error is added to the next step's gradients."""

    def __init__(self) -> None:
        self.residual: dict[str, Tensor] = {}

    def begin(self, gradients: hvd.Gradients, links: hvd.Links) -> hvd.ExchangeWork:
        for name, piece in zip(gradients.names, gradients.pieces, strict=True):
            whole = piece + self.residual.get(name, 0.0)
            piece.copy_(whole.sign() * whole.abs().mean())
            self.residual[name] = whole - piece
        within = links.within.all_reduce(gradients.flat, f"the signs of the {gradients.what}")
        within.wait()
        return hvd.ExchangeWork(
            gradients, [links.across.all_reduce(gradients.flat, f"the signs of the {gradients.what}")]
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(self.residual)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.residual = dict(state)


class Counted(hvd.ExchangeWork):
    """Notes what it divides by."""

    def __init__(self, gradients: hvd.Gradients, works: Sequence[Work], counts: list[int]) -> None:
        super().__init__(gradients, works)
        self.counts = counts

    def finish(self, count: int) -> None:
        self.counts.append(int(count))
        super().finish(count)


class Looking(hvd.Exchange):
    """Sums gradients, and notes what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[str], int, list[tuple[int, ...]], bool]] = []
        self.counts: list[int] = []

    def begin(self, gradients: hvd.Gradients, links: hvd.Links) -> hvd.ExchangeWork:
        shapes = [tuple(piece.shape) for piece in gradients.pieces]
        self.seen.append((gradients.names, gradients.flat.numel(), shapes, gradients.takes_part))
        return Counted(
            gradients, [links.all.all_reduce(gradients.flat, f"the sum of the {gradients.what}")], self.counts
        )


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, 0.1 * (number + 1))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.arange(4.0).view(1, 4) + rank - step).square().sum().mul(0.01).backward()
        optimizer.step()


def values(model: nn.Module) -> list[float]:
    return torch.cat([param.detach().view(-1) for param in model.parameters()]).tolist()


@pytest.mark.parametrize("options", [{}, {"step_on_arrival": True}, {"bucket_cap_mb": 1e-6}])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_signs_with_a_scale_and_error_feedback_train_alike_on_all_ranks(size, options):
    def expected() -> list[float]:
        models = [make_model() for _ in range(size)]
        residuals = [[torch.zeros_like(param) for param in model.parameters()] for model in models]
        for step in range(4):
            sums: list[Any] = [0.0] * 4
            for rank, model in enumerate(models):
                model.zero_grad()
                model(torch.arange(4.0).view(1, 4) + rank - step).square().sum().mul(0.01).backward()
                for place, param in enumerate(model.parameters()):
                    whole = param.grad + residuals[rank][place]
                    sent = whole.sign() * whole.abs().mean()
                    residuals[rank][place] = whole - sent
                    sums[place] = sums[place] + sent
            with torch.no_grad():
                for model in models:
                    for param, total in zip(model.parameters(), sums, strict=True):
                        param.sub_(0.1 * total / size)
        return values(models[0])

    def rank(group: Group) -> list[float]:
        model = make_model()
        train(model, wrap(group, model, lr=0.1, exchange=ScaledSigns, **options), group.rank, range(4))
        return values(model)

    first, *others = run_ranks(size, rank)
    assert all(other == first for other in others)
    assert first == pytest.approx(expected(), abs=1e-5)


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_its_state_is_saved_by_parameter_name_and_training_goes_on_with_it(how):
    def train_on(optimizer: Any, model: nn.Module, again: Any, model_again: nn.Module, rank: int) -> None:
        train(model, optimizer, rank, range(3, 6))
        train(model_again, again, rank, range(3, 6))
        assert values(model_again) == values(model)

    def by_state_dict(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, lr=0.1, exchange=ScaledSigns)
        assert "hvdlite" not in optimizer.state_dict()
        train(model, optimizer, group.rank, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        assert sorted(saved["hvdlite"]["exchange"]) == sorted(name for name, _ in model.named_parameters())
        model_again = copy.deepcopy(model)
        again = wrap(group, model_again, lr=0.1, exchange=ScaledSigns)
        again.load_state_dict(saved)
        assert "hvdlite" in saved
        train_on(optimizer, model, again, model_again, group.rank)
        # A plain optimizer, and one whose exchange starts without state.
        torch.optim.SGD(model.parameters(), lr=0.1).load_state_dict(saved)
        bare = {key: value for key, value in saved.items() if key != "hvdlite"}
        again.load_state_dict(bare)
        assert "hvdlite" not in again.state_dict()
        # A checkpoint from before hvdlite's parts had a key in common.
        again.load_state_dict({**bare, "exchange": saved["hvdlite"]["exchange"]})
        assert again.state_dict()["hvdlite"].keys() == {"exchange"}
        with pytest.raises(ValueError, match=r"ScaledSigns has a state on each rank, and no method consolidate"):
            again.consolidate_state_dict()

    def by_pickle(rank: int) -> None:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), exchange=ScaledSigns)
        train(model, optimizer, rank, range(3))
        model_again, again = pickle.loads(pickle.dumps((model, optimizer)))
        train_on(optimizer, model, again, model_again, rank)

    if how == "pickle":
        run_worlds(2, by_pickle)
    else:
        run_ranks(2, by_state_dict)


def test_state_that_there_is_nobody_for_is_an_error():
    def rank(group: Group) -> None:
        optimizer = wrap(group, make_model(), lr=0.1)
        state = optimizer.state_dict()
        assert set(state) == {"state", "param_groups"}
        with pytest.raises(ValueError, match=r"the state of an exchange, for '0.weight' .* same .* or exchange="):
            optimizer.load_state_dict({**state, "hvdlite": {"exchange": {"0.weight": torch.zeros(3, 4)}}})

    run_ranks(1, rank)


def test_it_sees_gradients_alone_and_counts_travel_beside_them():
    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, lr=0.1, exchange=Looking)
        optimizer._reducer.connect()
        group.engine.calls.clear()
        # The last layer's bias has a gradient on rank 1 only.
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if group.rank == 0:
            model[1].bias.grad = None
        model[0].bias.grad = None
        optimizer.synchronize()
        names = ["1.bias", "1.weight", "0.bias", "0.weight"]
        shapes = [(2,), (2, 3), (3,), (3, 4)]
        assert optimizer._reducer.step.plan.exchange.seen == [(names, 23, shapes, True)]
        assert optimizer._reducer.step.plan.exchange.counts == [2]
        # The flags, and five elements for the number of samples of each rank. After them comes the comparison of
        # parameters.
        assert [numel for _, numel in group.engine.calls][:2] == [3 * 4 + 4 + 2 * 5, 23]
        assert model[0].bias.grad is None
        assert model[1].bias.grad.tolist() == [0.5, 0.5]
        assert model[1].weight.grad.unique().tolist() == [1.0]

    run_ranks(2, rank, counting)


def test_buckets_travel_during_backward():
    def rank(group: Group) -> tuple[int, int]:
        params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
        optimizer = wrap(group, params, exchange=Looking, bucket_cap_mb=1e-6)
        # In the first step, gradients wait until the ranks have compared their arguments.
        optimizer._reducer.connect()
        torch.cat(params).sum().backward()
        after_backward = len(optimizer._reducer.step.plan.exchange.seen)
        optimizer.step()
        return after_backward, len(optimizer._reducer.step.plan.exchange.seen)

    assert run_ranks(2, rank) == [(3, 3)] * 2


def test_links_lead_within_hosts_and_across_them():
    class Summing(hvd.Exchange):
        def begin(self, gradients: hvd.Gradients, links: hvd.Links) -> hvd.ExchangeWork:
            self.ranks = links.within.ranks, links.across.ranks, links.all.ranks
            links.within.all_reduce(gradients.flat, "within").wait()
            return hvd.ExchangeWork(gradients, [links.across.all_reduce(gradients.flat, "across")])

    def on(hosts: list[str]) -> Callable[[Group], Any]:
        def rank(group: Group) -> Any:
            group.hosts = tuple(hosts)
            param = nn.Parameter(torch.zeros(2))
            optimizer = wrap(group, [param], exchange=Summing)
            (param * (group.rank + 1)).sum().backward()
            optimizer.step()
            optimizer.close()
            return optimizer._reducer.step.plan.exchange.ranks[:2], param.tolist()

        return rank

    everybody = (0, 1, 2, 3)
    assert run_ranks(4, on(["a", "b", "a", "b"])) == [
        (((0, 2), (0, 1)), [-2.5, -2.5]),
        (((1, 3), (0, 1)), [-2.5, -2.5]),
        (((0, 2), (2, 3)), [-2.5, -2.5]),
        (((1, 3), (2, 3)), [-2.5, -2.5]),
    ]
    for hosts in (["a", "b", "c", "d"], ["a", "a", "a", "b"]):
        assert run_ranks(4, on(hosts)) == [(((own,), everybody), [-2.5, -2.5]) for own in range(4)]
    assert run_ranks(4, on(["a"] * 4)) == [((everybody, (own,)), [-2.5, -2.5]) for own in range(4)]


@pytest.mark.parametrize("average", ["all", "active"])
def test_a_rank_that_has_joined_gives_zeros_and_is_counted_or_not(average):
    def rank(own: int) -> Any:
        param = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), exchange=Looking)
        if own == 0:
            param.sum().backward()
            optimizer.step()
        hvd.join(average=average)
        exchange = optimizer._reducer.step.plan.exchange
        return next(takes_part for *_, takes_part in exchange.seen), exchange.counts[0], param[0].item()

    divisor = {"all": 2, "active": 1}[average]
    first, second = run_worlds(2, rank)
    assert first == (True, divisor, -1.0 / divisor)
    assert second[:2] == (False, divisor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": hvd.Sum}, "leave out op=hvd.Sum"),
        ({"op": hvd.Adasum}, "leave out op=hvd.Adasum"),
        ({"compression": hvd.Compression.fp16}, "leave out compression"),
        ({"gradient_predivide_factor": 2.0}, "leave out gradient_predivide_factor=2.0"),
        ({"autotune": True}, "it measures all-reduces"),
    ],
)
def test_what_says_otherwise_how_gradients_are_combined_is_refused(options, words):
    def rank(group: Group) -> None:
        with pytest.raises(ValueError, match=words):
            wrap(group, make_model(), lr=0.1, exchange=Looking, **options)

    run_ranks(1, rank)


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (3, "pass a class derived from hvd.Exchange, not an object of it, or a function"),
        (Looking(), "pass a class derived from hvd.Exchange, not an object of it"),
        (dict, "which is not an hvd.Exchange"),
    ],
)
def test_what_is_no_exchange_is_a_type_error_that_says_what_is_wanted(exchange, words):
    def rank(group: Group) -> None:
        with pytest.raises(TypeError, match=words):
            wrap(group, make_model(), lr=0.1, exchange=exchange)

    run_ranks(1, rank)


def test_ranks_with_different_exchanges_are_told():
    def rank(group: Group) -> None:
        with pytest.raises(hvd.MismatchError, match=r": exchange is .*test_exchange\.Looking.* rank 0 .*\.ScaledSigns"):
            wrap(group, make_model(), lr=0.1, exchange=(Looking, ScaledSigns)[group.rank]).step()

    run_ranks(2, rank)


def test_what_an_exchange_has_launched_before_it_failed_writes_into_no_later_gradient():
    launched: dict[int, Tensor] = {}

    class Failing(Looking):
        fails = True

        def begin(self, gradients: hvd.Gradients, links: hvd.Links) -> hvd.ExchangeWork:
            begun = super().begin(gradients, links)
            if self.fails:
                launched[links.all.rank] = gradients.flat
                raise ArithmeticError("in the midst of it")
            return begun

    def rank(group: Group) -> list[float]:
        param = nn.Parameter(torch.zeros(2))
        optimizer = wrap(group, [param], exchange=Failing)
        param.grad = torch.ones(2)
        with pytest.raises(ArithmeticError, match="in the midst"):
            optimizer.step()
        optimizer._reducer.step.plan.exchange.fails = False
        optimizer.zero_grad()
        (param * 3.0).sum().backward()
        launched[group.rank].fill_(float("nan"))
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-3.0, -3.0]] * 2


class AveragedSteps(hvd.Exchange):
    """Averages how each rank's own step changes the parameters."""

    after_step = True

    def begin(self, gradients: hvd.Gradients, links: hvd.Links) -> hvd.ExchangeWork:
        return hvd.ExchangeWork(
            gradients, [links.all.all_reduce(gradients.flat, f"the average of the {gradients.what}")]
        )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_exchange_that_comes_after_the_step_is_given_what_the_steps_have_changed(size):
    def rank(group: Group) -> tuple[list[Tensor], list[Tensor]]:
        after, before = make_model(), make_model()
        train(after, wrap(group, after, lr=0.1, exchange=AveragedSteps), group.rank, range(3))
        train(before, wrap(group, before, lr=0.1), group.rank, range(3))
        return list(after.parameters()), list(before.parameters())

    for after, before in run_ranks(size, rank):
        # Steps of SGD are linear in the gradients.
        torch.testing.assert_close(after, before)


class CarriesCounts(Looking):
    """Sums the counts together with the gradients."""

    carries_counts = True

    def begin(self, gradients: hvd.Gradients, links: hvd.Links) -> hvd.ExchangeWork:
        works = [links.all.all_reduce(gradients.with_counts, f"the sum of the {gradients.what}")]
        return Counted(gradients, works, self.counts)


def test_an_exchange_that_carries_the_counts_needs_one_collective_for_a_bucket():
    made: list[Looking] = []

    def rank(group: Group) -> tuple[list[Tensor], int, int]:
        model = make_model()
        exchange = CarriesCounts()
        made.append(exchange)
        optimizer = wrap(group, model, lr=0.1, exchange=lambda: exchange)
        train(model, optimizer, group.rank, range(2))
        before = len(optimizer._reducer.engine.group.engine.calls)
        train(model, optimizer, group.rank, range(2, 3))
        calls = len(optimizer._reducer.engine.group.engine.calls) - before
        same = make_model()
        train(same, wrap(group, same, lr=0.1, exchange=Looking), group.rank, range(3))
        torch.testing.assert_close(list(model.parameters()), list(same.parameters()), rtol=0, atol=0)
        return list(model.parameters()), calls, len(optimizer._reducer.step.plan.layout.buckets)

    outcomes = run_ranks(2, rank, counting)
    assert all(calls == buckets for _, calls, buckets in outcomes)
    assert [exchange.counts for exchange in made] == [[2] * 3] * 2


class FailsOnRank1(Looking):
    """Raises an error on rank 1 when it unpacks."""

    tells_failures = True

    def __init__(self, is_broken: bool) -> None:
        super().__init__()
        self.is_broken = is_broken

    def begin(self, gradients: hvd.Gradients, links: hvd.Links) -> hvd.ExchangeWork:
        begun = super().begin(gradients, links)
        return Broken(gradients, begun.works) if self.is_broken else begun


class Broken(hvd.ExchangeWork):
    """Fails at the end."""

    def finish(self, count: int) -> None:
        self.failure = ValueError("the wire has a hole")


def test_what_fails_on_one_rank_ends_the_step_on_all_where_the_exchange_tells_it():
    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, lr=0.1, exchange=lambda: FailsOnRank1(group.rank == 1))
        train(model, optimizer, group.rank, range(1))

    outcomes = attempt_ranks(2, rank)
    assert all("the wire has a hole" in str(outcome) for outcome in outcomes), outcomes
