"""What exists once per generation of the world, however many groups and process sets it has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from worlds import run_generations, run_worlds

import hvdlite as hvd
from hvdlite.runtime.world import current_world


def test_all_groups_of_a_world_report_to_its_one_watch():
    def rank(own: int) -> list[int]:
        world = current_world()
        few = hvd.add_process_set([0, 1])
        before = world.generation.watch.begun.copy()
        groups = [world.group, world.group.duplicate(), world.group.alone()]
        if few.included():
            groups += [few.require_group("it"), few.require_group("it").duplicate()]
        for number, group in enumerate(groups):
            for _ in range(number + 1):
                group.all_reduce(torch.ones(1), "a sum").wait()
        begun = world.generation.watch.begun
        return [begun[group.label] - before.get(group.label, 0) for group in groups]

    assert run_worlds(3, rank) == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3]]


def test_process_sets_have_the_generation_of_their_world_and_the_next_world_has_another():
    def rank(generations: Iterator[int]) -> list[bool]:
        seen = []
        for _ in generations:
            generation = current_world().generation
            few = hvd.add_process_set([0])
            assert few.membership().generation is hvd.global_process_set.membership().generation is generation
            seen.append(generation)
        return [one is another for one, another in itertools.pairwise(seen)]

    assert run_generations([2, 2, 2], rank) == [[False, False]] * 2


def test_the_numbers_of_optimizers_are_counted_for_each_process_set_alone():
    def rank(own: int) -> list[list[int]]:
        few, reducers = hvd.add_process_set([0, 1]), current_world().generation.reducers
        made = []
        for process_set in (hvd.global_process_set, few, hvd.global_process_set):
            param = torch.nn.Parameter(torch.ones(1))
            made.append(hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), process_set=process_set))
        for optimizer in made:
            optimizer.step()
        groups = [process_set.membership().group for process_set in (hvd.global_process_set, few)]
        return [list(reducers.of(group).pin()) for group in groups if group is not None]

    assert run_worlds(3, rank) == [[[1, 2], [1]], [[1, 2], [1]], [[1, 2]]]
