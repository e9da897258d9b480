"""`step_of` makes the step of an optimizer in a world, by its settings and the ranks that there are."""

from __future__ import annotations

from ..buckets.flags import RankAndSize
from ..exchanges.exchange_state import exchange_of
from ..log import log
from ..runtime.survival import Survival
from .adasum_step import AdasumStep
from .averaged_step import AveragedStep
from .outer_step import OuterStep, ranks_of_host
from .step import Owner, Step
from .step_world import CarriedOver, StepWorld
from .surviving_step import SurvivingStep


def step_of(world: StepWorld, survival: Survival | None, owner: Owner, carried: CarriedOver) -> Step:
    """Returns the step for a world, without parameters. Raises TypeError if a user's factory makes no exchange.

    ``survival`` is None unless steps go on where a rank is lost. ``owner`` has the step, and that of the next world.
    """
    settings, group = world.settings, world.ranks
    outer = settings.outer
    if outer is not None and len(set(group.hosts)) == 1:
        if group.rank == 0:
            log.info(
                "outer=%r has no effect: all ranks are on one host, where gradients are averaged in every step", outer
            )
        outer = None
    ranks = RankAndSize(group.rank, group.size) if outer is None else ranks_of_host(group)
    exchange = exchange_of(settings, ranks.size, 1 if settings.shard is None else settings.shard.sharers(group).size)
    if exchange.after_step:
        return AdasumStep(world, exchange, ranks, carried)
    averaged = AveragedStep(world, exchange, ranks, carried, always_takes_back=survival is not None)
    if outer is not None:
        return OuterStep(averaged, outer.rule(), world)
    if survival is not None:
        return SurvivingStep(averaged, survival, owner, world, carried.losses)
    return averaged
