"""
Ranks that do not come: when that is told of, when it is the end, and in what words.

    operations that are pending, and waits elsewhere (for buckets) ── look, now and then ── warnings, ends

Pure, as all of `negotiation`, whose part it is: time is what the caller says it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .mismatch import name_ranks
from .pending import Id, Pending

# No bucket takes that long on its way; see `StallWatch.blocked`.
STANDSTILL_S = 10.0

# How many operations, or ranks, a message names.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class StallRules:
    """When a wait is told of, and when it is ended; seconds, None for never.

    ``timeout_s`` ends the wait for an operation; other waits are in an engine, which has a timeout of its own.
    """

    warn_after_s: float | None = None
    end_after_s: float | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """What every rank is doing, as far as it is known."""

    pending: Mapping[Id, Pending]
    waiting: Mapping[int, Collection[Id]]
    joined: Collection[int]


class StallWatch:
    """Looks for waits that have become too long."""

    def __init__(self, hosts: Sequence[str], rules: StallRules) -> None:
        self._hosts = hosts
        self._rules = rules
        # Waits that are no operation's: what for, since when.
        self._busy: dict[int, tuple[str, float]] = {}
        self._warned_at_s: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits elsewhere."""
        return not self._busy

    def busy(self, rank: int, what: str | None, since_s: float) -> None:
        """``rank`` has been waiting for other ranks in ``what``, which is no operation; None: no more."""
        if what is None:
            self._busy.pop(rank, None)
        else:
            self._busy[rank] = (what, since_s)

    def blocked(self, now_s: float) -> dict[int, str]:
        """By rank, the waits elsewhere in which nothing has happened for so long that nothing will by itself."""
        return {rank: what for rank, (what, since_s) in self._busy.items() if now_s - since_s >= STANDSTILL_S}

    def too_long(self, scene: Scene, now_s: float) -> tuple[list[str], list[tuple[Pending, str]]]:
        """What to warn of, and the operations to refuse, each with the words."""
        warnings: list[str] = []
        ends: list[tuple[Pending, str]] = []
        limit_s = self._rules.warn_after_s
        for pending in scene.pending.values():
            waited_s = now_s - pending.since_s
            if pending.refusal is not None:
                continue
            if _is_over(waited_s, self._rules.end_after_s) or _is_over(waited_s, self._rules.timeout_s):
                ends.append((pending, self._words(pending, scene, now_s)))
            elif _is_over(now_s - (pending.warned_at_s or pending.since_s), limit_s):
                pending.warned_at_s = now_s
                warnings.append(self._words(pending, scene, now_s))
        return warnings, ends

    def too_long_elsewhere(self, scene: Scene, now_s: float) -> tuple[list[str], list[int]]:
        """The words for waits that are no operation's, if there are such, and the ranks whose end they are."""
        limit_s = self._rules.warn_after_s
        since_s = {rank: since_s for rank, (_, since_s) in self._busy.items()}
        ranks = sorted(rank for rank in since_s if _is_over(now_s - since_s[rank], limit_s))
        if not ranks:
            self._warned_at_s = None
            return [], []
        waited_s = now_s - min(since_s[rank] for rank in ranks)
        elsewhere = [rank for rank in range(len(self._hosts)) if rank not in self._busy]
        have = "has" if len(ranks) == 1 else "have"
        words = (
            f"stalled: {name_ranks(ranks, self._hosts)} {have} waited {waited_s:.0f} s in "
            f"{self._busy[ranks[0]][0]}, for ranks that have not come there. Elsewhere, or hanging: "
            f"{self._whereabouts_of(elsewhere, scene)}"
        )
        if _is_over(waited_s, self._rules.end_after_s):
            return [words], ranks
        if self._warned_at_s is None or _is_over(now_s - self._warned_at_s, limit_s):
            self._warned_at_s = now_s
            return [words], []
        return [], []

    def _words(self, pending: Pending, scene: Scene, now_s: float) -> str:
        first = pending.first
        callers = name_ranks(sorted(pending.asks), self._hosts)
        missing = self._whereabouts_of(sorted(pending.missing(scene.joined)), scene)
        return (
            f"stalled: {first.what} in {first.of_set} has been waiting {now_s - pending.since_s:.0f} s. {callers} "
            f"called it; missing: {missing}"
        )

    def _whereabouts_of(self, ranks: Sequence[int], scene: Scene) -> str:
        shown = [f"{name_ranks([rank], self._hosts)}, {self._whereabouts(rank, scene)}" for rank in ranks[:_SHOWN]]
        return "; ".join(shown) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")

    def _whereabouts(self, rank: int, scene: Scene) -> str:
        if rank in self._busy:
            return f"which waits in {self._busy[rank][0]}"
        waits = [scene.pending[wait].first.what for wait in sorted(scene.waiting.get(rank, ()))]
        if waits:
            return f"which waits in {', '.join(waits[:_SHOWN])}"
        asked = [pending.first.what for pending in scene.pending.values() if rank in pending.asks]
        return f"which has called {', '.join(asked[:_SHOWN])}" if asked else "which computes or hangs"


def _is_over(waited_s: float, limit_s: float | None) -> bool:
    return limit_s is not None and waited_s >= limit_s
