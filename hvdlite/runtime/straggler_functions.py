"""
The public function `stragglers`, and `RankPace`, which it returns; `coordinator.stragglers` compares the ranks.
"""

from __future__ import annotations

from ..comm.step_clock import RankPace
from ..outside_graphs import keep_outside_graphs
from .world import current_world

__all__ = ["RankPace", "stragglers"]


def stragglers() -> list[RankPace]:
    """Returns how long each rank takes for its part of a step, the rank that costs the others most first.

    It is about the last minute, or the time since `init` if that is shorter, and a few seconds old: ranks send rank 0
    their times about once a second, and get those of all ranks about every two seconds, in jobs of more than 32 ranks
    less often. Any rank may call it, at any time; it waits for no other rank. Empty before the first few steps, with a
    single rank, and with ``HVDLITE_STRAGGLERS=0``.
    """
    return sorted(current_world().controller.stragglers(), key=lambda pace: -pace.cost)


keep_outside_graphs(globals())
