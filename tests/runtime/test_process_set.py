"""Process sets: their members, the collectives among members, and the calls that all ranks must make together."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from ranks import counting, generation_of, run_ranks
from torch import nn
from training import take_steps
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.control.unchecked import UncheckedController
from hvdlite.environment import Environment
from hvdlite.runtime.process_set import Registry
from hvdlite.runtime.world import current_world

SIZES = [1, 2, 3, 4]


@pytest.mark.parametrize("size", SIZES)
def test_the_set_of_all_ranks_is_always_there(size):
    def rank(own: int) -> Any:
        everyone = hvd.global_process_set
        return (everyone.process_set_id, everyone.ranks, everyone.size(), everyone.rank(), everyone.included())

    assert run_worlds(size, rank) == [(0, list(range(size)), size, own, True) for own in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_learns_a_sets_number_and_members_their_places(size):
    def rank(own: int) -> Any:
        last, all_but_first = hvd.ProcessSet([size - 1]), hvd.ProcessSet(range(size - 1, 0, -1)) if size > 2 else None
        seen = []
        if size > 1:
            assert hvd.add_process_set(last) is last
            seen.append((last.process_set_id, last.ranks, last.size(), last.included()))
        if all_but_first is not None:
            hvd.add_process_set(all_but_first)
            seen.append((all_but_first.process_set_id, all_but_first.ranks, all_but_first.included()))
            if own > 0:
                assert all_but_first.rank() == own - 1
        return seen

    for own, seen in enumerate(run_worlds(size, rank)):
        expected = [(1, [size - 1], 1, own == size - 1), (2, list(range(1, size)), own > 0)]
        assert seen == expected[: max(0, size - 1) if size < 3 else 2]


def test_overlapping_sets_and_disjoint_ones_each_keep_to_themselves():
    sets_of_ranks = [[0, 1], [2, 3], [1, 2], [0, 3], [0, 1, 2], [3]]

    def rank(own: int) -> Any:
        sets = [hvd.add_process_set(ranks) for ranks in sets_of_ranks]
        return [hvd.allgather_object(own, process_set=s) for s in sets for _ in range(2) if s.included()]

    for own, seen in enumerate(run_worlds(4, rank)):
        assert seen == [ranks for ranks in sets_of_ranks for _ in range(2) if own in ranks]


@pytest.mark.parametrize("check", [True, False])
def test_disjoint_sets_work_at_the_same_time_and_as_often_as_each_likes(check):
    def rank(own: int) -> Any:
        low, high = hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])
        if own < 2:
            assert [hvd.allreduce(torch.tensor(own), op=hvd.Sum, process_set=low).item() for _ in range(3)] == [1] * 3
            return [hvd.allgather_object((own, turn), process_set=low) for turn in range(7)][-1]
        return hvd.broadcast_object(own, root_rank=3, process_set=high)

    environment = Environment(stall_check=False, check=check)
    assert run_worlds(4, rank, environment) == [[(0, 6), (1, 6)]] * 2 + [3, 3]


def test_sets_are_added_and_removed_again_and_again_and_numbers_are_never_used_twice():
    def rank(own: int) -> Any:
        process_set = hvd.ProcessSet([0, 2])
        seen = []
        for _ in range(3):
            hvd.add_process_set(process_set)
            seen.append(process_set.process_set_id)
            if process_set.included():
                assert hvd.allgather_object(own, process_set=process_set) == [0, 2]
            assert hvd.remove_process_set(process_set)
            assert process_set.process_set_id is None
            assert not hvd.remove_process_set(process_set)
        return seen

    assert run_worlds(3, rank) == [[1, 2, 3]] * 3


def test_nothing_keeps_the_group_of_a_set_that_was_removed():
    def rank(own: int) -> bool:
        process_set = hvd.add_process_set([0, 2])
        group = weakref.ref(process_set.membership().group) if process_set.included() else lambda: None
        if process_set.included():
            hvd.allgather_object(own, process_set=process_set)
        hvd.remove_process_set(process_set)
        gc.collect()
        return group() is None

    assert run_worlds(3, rank) == [True] * 3


def test_the_set_of_all_ranks_is_not_removed_and_neither_is_one_that_was_never_added():
    def rank(own: int) -> Any:
        return hvd.remove_process_set(hvd.global_process_set), hvd.remove_process_set(hvd.ProcessSet([0]))

    assert run_worlds(2, rank) == [(False, False)] * 2


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([0, 1, 2], "Attempted to add a duplicate process set: .*ranks=.0, 1, 2."),
        ([2, 1], "Attempted to add a duplicate process set"),
        ([1, 3], "there is no rank 3; the job has the ranks 0 to 2"),
        *((ranks, "as a list, each once, such as") for ranks in ([], [0, 0], [0, -1], [0, 1.5], ["0"], [True], 3)),
    ],
)
def test_sets_that_cannot_be_are_one_error_on_every_rank_and_leave_no_trace(ranks, words):
    def rank(own: int) -> Any:
        hvd.add_process_set([1, 2])
        with pytest.raises(ValueError, match=words):
            hvd.add_process_set(ranks)
        return hvd.add_process_set([0, 2]).process_set_id

    assert run_worlds(3, rank) == [2] * 3


def test_only_members_may_use_a_set_and_only_while_it_is_registered():
    def rank(own: int) -> Any:
        process_set = hvd.ProcessSet([1])
        with pytest.raises(ValueError, match=r"call hvd\.add_process_set"):
            hvd.allgather_object(1, process_set=process_set)
        # So that no rank trains alone unnoticed.
        with pytest.raises(ValueError, match=r"call hvd\.add_process_set"):
            hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), process_set=process_set)
        assert (process_set.process_set_id, process_set.size(), process_set.rank()) == (None, None, None)
        assert process_set.included() == (own == 1)
        hvd.add_process_set(process_set)
        hvd.remove_process_set(hvd.add_process_set([0]))
        if own == 1:
            return hvd.allgather_object("x", process_set=process_set)
        words = r"^Allgather_object of .state.: Rank 0 is not a member of the provided process set\. Its ranks are"
        with pytest.raises(ValueError, match=words):
            hvd.allgather_object("x", "state", process_set=process_set)
        with pytest.raises(ValueError, match=r"^Process is not part of provided process set\."):
            process_set.rank()
        return "refused"

    assert run_worlds(2, rank) == ["refused", ["x"]]


@pytest.mark.parametrize("wrong", [None, [0], 0, "all"])
def test_what_is_no_process_set_is_refused_by_name(wrong):
    def rank(own: int) -> Any:
        for call in (hvd.broadcast_parameters, hvd.broadcast_object, hvd.allgather_object):
            with pytest.raises(TypeError, match=r"process_set=.* is not a hvd\.ProcessSet"):
                call({}, process_set=wrong)
        with pytest.raises(TypeError, match=r"DistributedOptimizer: process_set="):
            hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), process_set=wrong)

    run_worlds(1, rank)


def test_a_root_is_a_global_rank_and_must_be_a_member():
    def rank(own: int) -> Any:
        process_set = hvd.add_process_set([0, 2])
        if not process_set.included():
            return None
        weight = torch.full((2,), float(own))
        optimizer = torch.optim.SGD([nn.Parameter(weight.clone())], lr=float(own + 1))
        hvd.broadcast_parameters({"weight": weight}, root_rank=2, process_set=process_set)
        hvd.broadcast_optimizer_state(optimizer, root_rank=2, process_set=process_set)
        with pytest.raises(ValueError, match=r"root_rank=1 is not one of the ranks of the process set, 0, 2"):
            hvd.broadcast_parameters({"weight": weight}, root_rank=1, process_set=process_set)
        return weight.tolist(), optimizer.param_groups[0]["lr"], hvd.broadcast_object(own, 2, process_set=process_set)

    assert run_worlds(3, rank) == [([2.0, 2.0], 3.0, 2), None, ([2.0, 2.0], 3.0, 2)]


def test_messages_name_global_ranks_and_their_hosts():
    def rank(own: int) -> Any:
        process_set = hvd.add_process_set([1, 2])
        if process_set.included():
            with pytest.raises(hvd.MismatchError, match=r"rank 1 \(node1\).*rank 2 \(node2\)"):
                hvd.broadcast_parameters({"weight": torch.zeros(own)}, root_rank=1, process_set=process_set)
        # Rank 0, through which ranks agree, must not end before all are done.
        return hvd.allgather_object(own)

    assert run_worlds(3, rank) == [[0, 1, 2]] * 3


def test_ranks_that_add_or_remove_different_sets_are_told_and_may_go_on():
    def rank(own: int) -> Any:
        words = r"^Attempted to register process set with mismatching values on different ranks: .*\[0, 1\], but"
        with pytest.raises(hvd.MismatchError, match=words + r" another rank had \[1, 2\].*rank 2"):
            hvd.add_process_set([1, 2] if own == 2 else [0, 1])
        sets = [hvd.add_process_set([0]), hvd.add_process_set([1])]
        with pytest.raises(hvd.MismatchError, match="remove_process_set"):
            hvd.remove_process_set(sets[own == 1])
        assert hvd.remove_process_set(sets[0])
        return [each.process_set_id for each in (*sets, hvd.add_process_set([0, 1]))]

    assert run_worlds(3, rank) == [[None, 2, 3]] * 3


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    take_steps(optimizer, lambda batch: model(batch).square().mean(), batches)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.fp16, "gradient_predivide_factor": 3.0}])
def test_members_train_as_one_process_on_their_batches_and_others_as_one_on_theirs(options):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    batches = [torch.randn(4, 2, 3) for _ in range(3)]  # by step, rank and row

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def alone(ranks: list[int]) -> list[torch.Tensor]:
        model = copy.deepcopy(first)
        return _train(model, optimizer_of(model), [batch[ranks].flatten(0, 1) for batch in batches])

    def rank(own: int) -> Any:
        process_set = hvd.add_process_set([0, 3])
        model = copy.deepcopy(first)
        optimizer = hvd.DistributedOptimizer(
            optimizer_of(model), model.named_parameters(), process_set=process_set, **options
        )
        optimizer.synchronize()
        params = _train(model, optimizer, [batch[own] for batch in batches])
        optimizer.close()
        return params

    for own, params in enumerate(run_worlds(4, rank)):
        expected = alone([0, 3] if own in (0, 3) else [own])
        exact = own not in (0, 3)
        for got, wanted in zip(params, expected, strict=True):
            tolerance = 0.0 if exact else (1e-3 if options else 1e-6)
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_one_model_may_be_averaged_over_one_set_and_another_over_one_that_overlaps():
    def rank(own: int) -> Any:
        steps = []
        for ranks in ([0, 1], [1, 2]):
            process_set = hvd.add_process_set(ranks)
            weight = nn.Parameter(torch.zeros(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=process_set)
            (weight.sum() * own).backward()
            optimizer.step()
            steps.append(-weight[0].item())
        # Rank 0, through which ranks agree, is in the first set only, and must not end before the others.
        hvd.barrier()
        return steps

    assert run_worlds(3, rank) == [[0.5, 0], [0.5, 1.5], [2, 1.5]]


@pytest.mark.parametrize("average", ["all", "active"])
def test_ranks_that_have_joined_sit_out_the_steps_of_their_sets(average):
    steps_of = [1, 2, 3, 2]

    def rank(own: int) -> Any:
        process_set = hvd.add_process_set([0, 1, 2])
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=process_set)
        for _ in range(steps_of[own]):
            optimizer.zero_grad()
            (weight.sum() * (own + 1)).backward()
            optimizer.step()
            if process_set.included():
                hvd.allreduce(weight.detach(), process_set=process_set)
        last = hvd.join(average=average)
        return -weight[0].item(), hvd.allgather_object(last, process_set=process_set) if own < 3 else None

    # Of ranks 0 to 2, whose gradients are 1 to 3, the first takes one step, the second two, the third three.
    sums, counts = [6, 5, 3], [3, 2, 1]
    moves = [total / (3 if average == "all" else count) for total, count in zip(sums, counts, strict=True)]
    for own, (moved, lasts) in enumerate(run_worlds(4, rank)):
        assert moved == pytest.approx(sum(moves[: steps_of[own]]) if own < 3 else 8)
        assert own == 3 or len(set(lasts)) == 1


def test_gradients_that_one_optimizer_leaves_for_another_of_another_set_are_known_as_such():
    """As in a GAN: the generator's backward passes through the discriminator."""

    def rank(own: int) -> Any:
        process_set = hvd.add_process_set([0, 1])
        generator, discriminator = (nn.Parameter(torch.full((2,), 2.0)) for _ in range(2))
        of_generator = hvd.DistributedOptimizer(torch.optim.SGD([generator], lr=1.0))
        of_discriminator = hvd.DistributedOptimizer(torch.optim.SGD([discriminator], lr=1.0), process_set=process_set)
        (generator * discriminator).sum().backward()
        of_generator.step()
        of_discriminator.zero_grad()
        (discriminator.sum() * own).backward()
        of_discriminator.step()
        return discriminator[0].item()

    assert run_worlds(3, rank) == [1.5, 1.5, 0]


def test_an_optimizer_of_a_set_that_was_removed_says_so():
    def rank(own: int) -> Any:
        process_set = hvd.add_process_set([0, 1])
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=process_set)
        hvd.remove_process_set(process_set)
        with pytest.raises(hvd.CommunicationError, match="remove_process_set"):
            weight.sum().backward()
        optimizer.close()
        return hvd.allgather_object(own)

    assert run_worlds(3, lambda own: rank(own) if own < 2 else _add_and_remove()) == [[0, 1, 2]] * 3


def _add_and_remove() -> Any:
    hvd.remove_process_set(hvd.add_process_set([0, 1]))
    return hvd.allgather_object(2)


def test_outsiders_open_no_channel_and_members_one_that_only_they_use():
    def rank(group: Group) -> int:
        generation = generation_of(group)
        sets = Registry(group, UncheckedController(group.size, generation.recorder), generation)
        process_set = hvd.ProcessSet([1, 2])
        sets.add(process_set)
        before = len(group.engine.calls)
        if process_set.included():
            assert process_set.require_group("it").all_gather_json(group.rank, "it") == [1, 2]
            process_set.require_group("it").duplicate()
        used = len(group.engine.calls) - before
        sets.close()
        assert process_set.process_set_id is None
        return used

    assert run_ranks(3, rank, counting) == [0, 2, 2]


def test_in_an_elastic_job_a_set_may_come_to_have_all_ranks_but_none_that_are_gone():
    def rank(own: int) -> Any:
        sets = current_world().sets
        sets._is_elastic = True
        of_all = hvd.add_process_set([0, 1])
        assert (of_all.process_set_id, of_all.size(), of_all.rank()) == (1, 2, own)
        assert hvd.allreduce(torch.ones(2) * own, op=hvd.Sum, process_set=of_all).tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
            hvd.add_process_set([1, 0])
        with pytest.raises(
            ValueError, match=r"there is no rank 2; the job has the ranks 0 to 1 now. With --min-np 3 it always has"
        ):
            hvd.add_process_set([0, 2])

    run_worlds(2, rank)


def test_a_set_of_which_a_rank_is_lost_while_it_is_added_leaves_nothing_behind(monkeypatch):
    """All that ends with the world goes on to end: what waits in it, and the sets that there are."""

    def rank(own):
        sets, controller = current_world().sets, current_world().controller
        seen = []

        def lose(group):
            # As the thread that ends all waits would, at this moment.
            seen.append(sets.groups())
            raise hvd.CommunicationError("a rank was lost while the set connected")

        open_group = controller.open_group
        controller.open_group = lose
        if own == 2:
            hvd.add_process_set([0, 1])
        else:
            with pytest.raises(hvd.CommunicationError, match="a rank was lost while the set connected"):
                hvd.add_process_set([0, 1])
            assert seen == [[]]
            assert not sets.has_any
        controller.open_group = open_group
        again = hvd.add_process_set([0, 2])
        if own != 1:
            assert hvd.allreduce(torch.ones(1), process_set=again, op=hvd.Sum).item() == 2
        sets.close()

    run_worlds(3, rank)


def test_a_copy_is_the_set_itself_and_a_pickled_one_is_its_ranks():
    def rank(own: int) -> Any:
        process_set = hvd.add_process_set([1, 0] if hvd.size() > 2 else [0])
        assert copy.deepcopy(process_set) is process_set
        loaded = pickle.loads(pickle.dumps(process_set))
        assert (loaded.ranks, loaded.process_set_id) == (process_set.ranks, None)
        assert pickle.loads(pickle.dumps(hvd.global_process_set)) is hvd.global_process_set
        return str(process_set)

    assert run_worlds(3, rank) == ["ProcessSet(process_set_id=1, ranks=[0, 1])"] * 3


def test_init_registers_sets_and_shutdown_forgets_them():
    only = hvd.ProcessSet([0])
    with pytest.raises(hvd.NotInitializedError):
        hvd.global_process_set.size()
    assert str(hvd.global_process_set) == "global_process_set"
    with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
        hvd.init(process_sets=[only])
    assert not hvd.is_initialized()
    hvd.init(process_sets="dynamic")
    assert hvd.global_process_set.ranks == [0]
    hvd.shutdown()
    assert not hvd.remove_process_set(only)
    with pytest.raises(hvd.NotInitializedError):
        hvd.add_process_set([0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"process_sets": [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2]), hvd.ProcessSet([1, 0])]},
            r"Horovod could not be initialized because process_sets entry number 2 is a duplicate: "
            r"ProcessSet\(process_set_id=None, ranks=\[0, 1\]\)",
        ),
        ({"process_sets": [hvd.ProcessSet([5])]}, "there is no rank 5"),
        ({"process_sets": [[0]]}, "entry number 0"),
        ({"process_sets": "static"}, "neither a list"),
        ({"process_sets": hvd.ProcessSet([0])}, "neither a list"),
    ],
)
def test_an_init_that_fails_leaves_nothing_initialized(arguments, words):
    with pytest.raises(ValueError, match=words):
        hvd.init(**arguments)
    assert not hvd.is_initialized()


COLLECTIVES = {
    "allreduce": lambda x, s: hvd.allreduce(x, op=hvd.Sum, process_set=s),
    "allgather": lambda x, s: hvd.allgather(x, process_set=s),
    "broadcast": lambda x, s: hvd.broadcast(x, 3, process_set=s),
    "alltoall": lambda x, s: hvd.alltoall(x, process_set=s),
    "reducescatter": lambda x, s: hvd.reducescatter(x, op=hvd.Sum, process_set=s),
    "barrier": lambda x, s: hvd.barrier(process_set=s),
}


def test_collectives_in_overlapping_sets_are_among_their_members_alone():
    def rank(own: int) -> Any:
        first, second = hvd.add_process_set([1, 3]), hvd.add_process_set([0, 2, 3])
        x = torch.arange(6.0) + 10 * own
        seen = {}
        for name, call in COLLECTIVES.items():
            for each in (first, second):
                if each.included():
                    result = call(x, each)
                    seen[name, each.process_set_id] = None if result is None else result.tolist()
                else:
                    with pytest.raises(
                        ValueError,
                        match=rf"^{name.capitalize()}: Rank {own} is not a member of the provided process set\.",
                    ):
                        call(x, each)
        return seen

    def model(own: int) -> Any:
        seen = {}
        for set_id, ranks in ((1, [1, 3]), (2, [0, 2, 3])):
            if own in ranks:
                xs, place = torch.stack([torch.arange(6.0) + 10 * rank for rank in ranks]), ranks.index(own)
                parts = xs.chunk(len(ranks), 1)
                seen |= {
                    ("allreduce", set_id): xs.sum(0).tolist(),
                    ("allgather", set_id): xs.flatten().tolist(),
                    ("broadcast", set_id): xs[-1].tolist(),
                    ("alltoall", set_id): parts[place].flatten().tolist(),
                    ("reducescatter", set_id): parts[place].sum(0).tolist(),
                    ("barrier", set_id): None,
                }
        return seen

    assert run_worlds(4, rank) == [model(own) for own in range(4)]


def test_gradients_of_collectives_stay_in_their_set_and_asynchronous_ones_of_two_sets_do_not_mix():
    def rank(own: int) -> Any:
        pair, all_three = hvd.add_process_set([0, 2]), hvd.global_process_set
        x = torch.full((2,), float(own), requires_grad=True)
        if not pair.included():
            return hvd.allreduce(x.detach(), name="x", process_set=all_three).tolist()
        # The same name in two sets names two operations.
        handles = [hvd.allreduce_async(x.detach(), name="x", process_set=each) for each in (pair, all_three)]
        hvd.allreduce(x, op=hvd.Sum, process_set=pair).sum().backward()
        return [hvd.synchronize(handle).tolist() for handle in reversed(handles)], x.grad.tolist()

    outer = ([[1.0, 1.0], [1.0, 1.0]], [2.0, 2.0])
    assert run_worlds(3, rank) == [outer, [1.0, 1.0], outer]
