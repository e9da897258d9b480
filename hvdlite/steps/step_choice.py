"""`step_of` makes the step of an optimizer in a world, by its settings and the ranks that there are."""

from __future__ import annotations

from ..buckets.flags import RankAndSize
from ..exchanges.exchange_choice import exchange_of
from ..log import log
from ..runtime.survival import Survival
from .adasum_step import AdasumStep
from .averaged_step import AveragedStep
from .outer_step import OuterStep
from .outer_steps import OuterSteps
from .step import Owner, Step
from .step_world import CarriedOver, StepWorld
from .surviving_step import SurvivingStep


def step_of(world: StepWorld, survival: Survival | None, owner: Owner, carried: CarriedOver) -> Step:
    """Returns the step for a world, without parameters. Raises TypeError if a user's factory makes no exchange.

    ``survival`` is None unless steps go on where a rank is lost. ``owner`` has the step, and that of the next world.
    """
    outer = outer_steps_of(world)
    ranks = RankAndSize(world.ranks.rank, world.ranks.size) if outer is None else outer.inner
    shard = world.settings.shard
    exchange = exchange_of(world.settings, ranks.size, 1 if shard is None else shard.sharers(world.ranks).size)
    if exchange.after_step:
        return AdasumStep(world, exchange, ranks, carried)
    averaged = AveragedStep(world, exchange, ranks, carried, always_takes_back=survival is not None)
    if outer is not None:
        return OuterStep(averaged, outer, world)
    if survival is not None:
        return SurvivingStep(averaged, survival, owner, world, carried.losses)
    return averaged


def outer_steps_of(world: StepWorld) -> OuterSteps | None:
    """Returns the outer steps of an optimizer, or None without ``outer=``, or on a single host."""
    settings, ranks = world.settings, world.ranks
    if settings.outer is None:
        return None
    if len(set(ranks.hosts)) == 1:
        if ranks.rank == 0:
            log.info(
                "outer=%r has no effect: all ranks are on one host, where gradients are averaged in every step",
                settings.outer,
            )
        return None
    return OuterSteps(
        settings.outer.rule(),
        ranks,
        world.trace,
        cap_bytes=settings.cap_bytes,
        compares=world.compares,
        is_later=world.worlds > 0,
    )
