"""A rank is lost within a step: the others finish the step, or discard it where their engine cannot repeat it."""

from __future__ import annotations

import copy

import pytest
import torch
from survivors import Death, Unheard, run_survivors

import hvdlite as hvd
from hvdlite import faults

STEPS = 6
CANNOT_REPEAT = {"cpu": "the engine of this test"}
# All points of a step, in order, and whether the gradients of a rank that is lost there are in the step's averages.
POINTS = {"begin": False, "backward": False, "synchronize": False, "vote": False, "voted": True, "stepped": True}


# Made once, since all threads have the same random numbers.
START = torch.nn.Sequential(
    torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
).double()


def model_of():
    return copy.deepcopy(START)


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean()


def wrapped(model, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), bucket_cap_mb=0.0003, **arguments)


def plain_step(optimizer, model, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def synchronized_step(optimizer, model, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    with optimizer.skip_synchronize():
        optimizer.step()


def step_with_closure(optimizer, model, rank, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None


def scaled_step(optimizer, model, rank, step):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, rank, step)).backward()
    scaler.step(optimizer)
    scaler.update()


def weighted_step(optimizer, model, rank, step):
    optimizer.zero_grad()
    optimizer.weighted(loss_of(model, rank, step), 4).backward()
    optimizer.step()


def two_passes_step(optimizer, model, rank, step):
    optimizer.zero_grad()
    with optimizer.no_sync():
        (0.25 * loss_of(model, rank, step)).backward()
    (0.75 * loss_of(model, rank, step)).backward()
    optimizer.step()


def zeroing_step(optimizer, model, rank, step):
    """Autograd adds to gradients of zeros, which lie in the buckets."""
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, rank, step).backward()
    optimizer.step()


def thawing_step(optimizer, model, rank, step):
    """Each half of the parameters is frozen while the gradients of the other are computed."""
    optimizer.zero_grad()
    params = list(model.parameters())
    for half in (params[2:], params[:2]):
        for param in params:
            param.requires_grad_(all(param is not each for each in half))
        loss_of(model, rank, step).backward()
    model.requires_grad_(True)
    optimizer.step()


def trained(take_step, **arguments):
    def program(rank):
        model = model_of()
        optimizer = wrapped(model, **arguments)
        for step in range(STEPS):
            take_step(optimizer, model, rank, step)
        return [param.detach().clone() for param in model.parameters()]

    return program


def by_one_process(ranks_of_steps, *, averages=True):
    """The parameters after steps with the batches of these ranks; a step without any is left out."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, ranks in enumerate(ranks_of_steps):
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, rank, step) / (len(ranks) if averages else 1)).backward()
        if ranks:
            optimizer.step()
    return [param.detach() for param in model.parameters()]


def require(left, expected):
    first, *others = left.values()
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True)), "the ranks differ in bits"
    for got, right in zip(first, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


@pytest.mark.night(but=7)
@pytest.mark.slow(but=4)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_where_gradients_can_be_averaged_again_the_others_finish_the_step(monkeypatch, point, rank):
    left = run_survivors(monkeypatch, ["a", "b", "c"], trained(plain_step), Death(rank, point, 3))
    others = [each for each in range(3) if each != rank]
    assert list(left) == others
    require(left, by_one_process([range(3)] * (3 + POINTS[point]) + [others] * (3 - POINTS[point])))


@pytest.mark.night(but=7)
@pytest.mark.slow(but=3)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_where_they_cannot_all_others_discard_the_step(monkeypatch, caplog, point, rank):
    left = run_survivors(
        monkeypatch, ["a", "b", "c"], trained(plain_step), Death(rank, point, 3), cannot_repeat=CANNOT_REPEAT
    )
    others = [each for each in range(3) if each != rank]
    discarded = 3 + POINTS[point]
    require(left, by_one_process([range(3)] * discarded + [()] + [others] * (STEPS - discarded - 1)))
    lines = {each.getMessage() for each in caplog.records if "is discarded" in each.getMessage()}
    assert lines, "nobody has told of it"
    for line in lines:
        assert "is discarded on all ranks, and changes no parameter: the engine of this test cannot average" in line
        assert "The batches of 2 ranks are lost" in line
        assert f"rank {rank} was lost" in line


FORMS = [
    (synchronized_step, {}),
    (step_with_closure, {}),
    (scaled_step, {}),
    (weighted_step, {}),
    (two_passes_step, {}),
    (zeroing_step, {}),
    (thawing_step, {}),
    # Each pass is the first of two.
    (plain_step, {"backward_passes_per_step": 2}),
    (plain_step, {"max_norm": 1e9}),
    (plain_step, {"groups": 2}),
]


# With two passes the first point is in the pass in `no_sync`.
@pytest.mark.night(but=10)
@pytest.mark.slow(but=4)
@pytest.mark.parametrize("point", ["begin", "vote"])
@pytest.mark.parametrize(("take_step", "arguments"), FORMS)
def test_a_step_of_any_form_is_finished_with_the_gradients_of_those_that_are_left(
    monkeypatch, take_step, arguments, point
):
    left = run_survivors(monkeypatch, ["a", "b", "c"], trained(take_step, **arguments), Death(1, point, 2))
    require(left, by_one_process([range(3)] * 2 + [(0, 2)] * 4))


@pytest.mark.parametrize("point", POINTS)
def test_a_step_in_which_gradients_are_late_is_finished_with_those_of_the_ranks_that_are_left(monkeypatch, point):
    """Half of the parameters are frozen for two steps, and thawed within the next, in which a rank is lost."""
    late = 2

    def take_step(optimizer, model, rank, step):
        frozen = list(model.parameters())[2:]
        for param in frozen:
            param.requires_grad_(False)
        if step >= late:
            thawing_step(optimizer, model, rank, step)
        else:
            plain_step(optimizer, model, rank, step)

    left = run_survivors(monkeypatch, ["a", "b", "c"], trained(take_step), Death(1, point, late))
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        ranks = range(3) if step < late + POINTS[point] else (0, 2)
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, rank, step) / len(ranks)).backward()
        for param in list(model.parameters())[2:] if step < late else []:
            param.grad = None
        optimizer.step()
    require(left, [param.detach() for param in model.parameters()])


@pytest.mark.parametrize("point", ["backward", "vote"])
def test_gradients_that_are_summed_are_those_of_the_ranks_that_are_left(monkeypatch, point):
    left = run_survivors(monkeypatch, ["a", "b", "c"], trained(plain_step, op=hvd.Sum), Death(1, point, 2))
    require(left, by_one_process([range(3)] * 2 + [(0, 2)] * 4, averages=False))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("take_step", "arguments"), FORMS)
def test_a_step_of_any_form_is_discarded_as_a_whole(monkeypatch, take_step, arguments):
    left = run_survivors(
        monkeypatch,
        ["a", "b", "c"],
        trained(take_step, **arguments),
        Death(1, "vote", 2),
        cannot_repeat=CANNOT_REPEAT,
    )
    require(left, by_one_process([range(3)] * 2 + [()] + [(0, 2)] * 3))


def test_ranks_that_are_lost_one_after_the_other_cost_a_step_each(monkeypatch):
    left = run_survivors(
        monkeypatch,
        ["a", "b", "c", "d"],
        trained(plain_step),
        Death(0, "backward", 1),
        Death(2, "vote", 2),
        Death(3, "stepped", 4),
        cannot_repeat=CANNOT_REPEAT,
    )
    require(left, by_one_process([range(4), (), (), (1, 3), (1, 3), ()]))


def test_gradients_that_cannot_be_averaged_again_are_not_kept(monkeypatch):
    def program(rank):
        optimizer = wrapped(model_of())
        return optimizer._reducer.step.kept

    assert run_survivors(monkeypatch, ["a", "b"], program, cannot_repeat=CANNOT_REPEAT) == {0: None, 1: None}
    assert all(run_survivors(monkeypatch, ["a", "b"], program).values())


def test_the_gradients_of_a_discarded_step_are_zeros_and_the_norm_is_that_of_the_step_before(monkeypatch):
    def program(rank):
        model = model_of()
        optimizer = wrapped(model, max_norm=1.0)
        norms = []
        for step in range(3):
            plain_step(optimizer, model, rank, step)
            norms.append(optimizer.grad_norm.item())
            is_zero = all(not param.grad.any() for param in model.parameters())
            assert is_zero == (step == 1)
        return norms

    left = run_survivors(monkeypatch, ["a", "b"], program, Death(1, "vote", 1), cannot_repeat=CANNOT_REPEAT)
    first, second, third = left[0]
    assert first == second != third


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("cannot_repeat", [None, CANNOT_REPEAT])
@pytest.mark.parametrize("point", ["synchronize", "vote", "voted"])
def test_gradients_that_are_on_their_way_while_another_optimizer_goes_on_are_averaged_again_or_discarded_too(
    monkeypatch, point, cannot_repeat
):
    def program(rank):
        models = [model_of(), model_of()]
        optimizers = [wrapped(model) for model in models]
        for step in range(STEPS):
            for optimizer, model in zip(optimizers, models, strict=True):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [param.detach().clone() for model in models for param in model.parameters()]

    # In the first optimizer's third step, when the buckets of both have been sent.
    left = run_survivors(monkeypatch, ["a", "b", "c"], program, Death(1, point, 4), cannot_repeat=cannot_repeat)
    again = (0, 2) if cannot_repeat is None else ()
    first = by_one_process([range(3)] * 2 + [range(3) if POINTS[point] else again] + [(0, 2)] * 3)
    require(left, [*first, *by_one_process([range(3)] * 2 + [again] + [(0, 2)] * 3)])


SAMPLES = (3, 5, 9)


def by_one_process_with_weights(ranks_of_steps):
    """The parameters after steps with all samples of these ranks' batches, of which rank r has ``SAMPLES[r]``."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, ranks in enumerate(ranks_of_steps):
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, rank, step) * SAMPLES[rank] / sum(SAMPLES[each] for each in ranks)).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("is_early", [False, True], ids=["each before its backward pass", "both before"])
@pytest.mark.parametrize(
    ("deaths", "unheard", "of_first", "of_second"),
    [
        ([Death(1, "vote", 4)], [], 2, 2),
        # All have the averages of the first optimizer; some rank learns it only where others have begun the next step.
        ([Death(0, "voted", 4)], [Unheard(2, 4)], 3, 2),
        ([Death(0, "voted", 5)], [Unheard(2, 5)], 3, 3),
    ],
    ids=["in the first's step", "behind the first's vote", "behind the second's"],
)
def test_the_losses_of_two_optimizers_are_weighted_alike_on_all_ranks(
    monkeypatch, deaths, unheard, of_first, of_second, is_early
):
    def program(rank):
        models = [model_of(), model_of()]
        optimizers = [wrapped(model) for model in models]
        for step in range(STEPS):
            losses = []
            for optimizer, model in zip(optimizers, models, strict=True):
                optimizer.zero_grad()
                losses.append(lambda model=model, step=step: loss_of(model, rank, step))
            if is_early:
                made = [opt.weighted(loss(), SAMPLES[rank]) for opt, loss in zip(optimizers, losses, strict=True)]
                losses = [lambda each=each: each for each in made]
            for optimizer, loss in zip(optimizers, losses, strict=True):
                (loss() if is_early else optimizer.weighted(loss(), SAMPLES[rank])).backward()
                optimizer.step()
        return [param.detach().clone() for model in models for param in model.parameters()]

    left = run_survivors(monkeypatch, ["a", "b", "c"], program, *deaths, unheard=unheard)
    gone = {death.rank for death in deaths}
    others = [rank for rank in range(3) if rank not in gone]
    expected = [
        each
        for whole in (of_first, of_second)
        for each in by_one_process_with_weights([range(3)] * whole + [others] * (STEPS - whole))
    ]
    require(left, expected)


def test_averages_that_have_arrived_are_used_where_another_optimizer_has_gone_on(monkeypatch):
    def program(rank):
        models = [model_of(), model_of()]
        first, second = (wrapped(model) for model in models)
        for step in range(STEPS):
            for optimizer, model in zip((first, second), models, strict=True):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
            second.synchronize()
            faults.point("stepped")  # so that what follows has a number of its own
            first.step()
            second.step()
        return [param.detach().clone() for model in models for param in model.parameters()]

    # Behind the vote of the first optimizer's third step, of which rank 1 hears, and which it ends before the others.
    left = run_survivors(monkeypatch, ["a", "b", "c"], program, Death(0, "voted", 7), unheard=[Unheard(2, 7)])
    require(left, 2 * by_one_process([range(3)] * 3 + [(1, 2)] * 3))


def noise(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 + 100 * step + rank), dtype=torch.float64)


GENERATOR = torch.nn.Linear(6, 6).double()


def gan_by_one_process(ranks_of_discriminator, ranks_of_generator):
    models = [model_of(), copy.deepcopy(GENERATOR)]
    of_discriminator, of_generator = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models)
    for step, (real, fake) in enumerate(zip(ranks_of_discriminator, ranks_of_generator, strict=True)):
        of_discriminator.zero_grad()
        for rank in real:
            (models[0](models[1](noise(rank, step)).detach()).square().mean() / len(real)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        for rank in fake:
            (models[0](models[1](noise(rank, step))).cos().mean() / len(fake)).backward()
        of_generator.step()
    return [param.detach() for model in models for param in model.parameters()]


@pytest.mark.night(but=10)
@pytest.mark.slow(but=3)
@pytest.mark.parametrize("drops", ["the optimizer", "the module", "nobody"])
@pytest.mark.parametrize(
    ("death", "unheard", "is_averaged"),
    [
        *[(Death(1, point, 5), [], used) for point, used in POINTS.items()],
        # Rank 1 hears of the vote, and drops the gradients while rank 2 is still in the generator's step.
        (Death(0, "voted", 5), [Unheard(2, 5)], True),
    ],
    ids=[*POINTS, "unheard"],
)
def test_gradients_that_a_generators_step_leaves_in_the_discriminator_are_dropped_by_all_ranks(
    monkeypatch, death, unheard, is_averaged, drops
):
    def program(rank):
        models = [model_of(), copy.deepcopy(GENERATOR)]
        of_discriminator, of_generator = (wrapped(model) for model in models)
        for step in range(STEPS):
            if drops == "the optimizer":
                of_discriminator.zero_grad()
            elif drops == "the module":
                models[0].zero_grad()
            else:
                for param in models[0].parameters():
                    param.grad = None
            models[0](models[1](noise(rank, step)).detach()).square().mean().backward()
            of_discriminator.step()
            of_generator.zero_grad()
            models[0](models[1](noise(rank, step))).cos().mean().backward()
            of_generator.step()
        return [param.detach().clone() for model in models for param in model.parameters()]

    left = run_survivors(monkeypatch, ["a", "b", "c"], program, death, unheard=unheard)
    others = [rank for rank in range(3) if rank != death.rank]
    of_generator = [range(3)] * (2 + is_averaged) + [others] * (STEPS - 2 - is_averaged)
    require(left, gan_by_one_process([range(3)] * 3 + [others] * (STEPS - 3), of_generator))


def test_a_collective_behind_the_step_raises_also_on_a_rank_that_takes_the_averages_of_others_in_the_next_step(
    monkeypatch,
):
    """Rank 2 has called it before it heard of the loss, and is in the next step when rank 0 comes to the call."""

    def program(rank):
        model, sums = model_of(), []
        optimizer = wrapped(model)
        for step in range(STEPS):
            plain_step(optimizer, model, rank, step)
            try:
                sums.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
            except hvd.PeerLostError as error:
                sums.append(str(error))
        return sums

    left = run_survivors(monkeypatch, ["a", "b", "c"], program, Death(1, "stepped", 3), unheard=[Unheard(0, 3)])
    assert "wait in their next step already" in left[0].pop(3)
    assert "rank 1 was lost" in left[2].pop(3)
    assert left[0] == left[2] == [3.0, 3.0, 3.0, 2.0, 2.0]
