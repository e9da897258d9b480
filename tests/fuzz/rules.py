"""
Which programs hvdlite may refuse in words, instead of training right: by its manual, and by what it says in messages.

`Truth` tells `Rules` what each rank does. A refusal is never asked for: the right numbers are always fine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .known import leave_if_known

Gradients = Mapping[str, Tensor | None]


@dataclass
class _Optimizer:
    """What an optimizer has seen on one rank since its last step, or since its gradients were dropped."""

    passes_per_step: int
    passes: dict[str, int] = field(default_factory=dict)
    backwards: set[int] = field(default_factory=set)

    @property
    def complete(self) -> list[str]:
        return [name for name, count in self.passes.items() if count >= self.passes_per_step]

    def forget(self) -> None:
        self.passes.clear()
        self.backwards.clear()


class Rules:
    """``excuse`` is why the program may be refused from now on; None as long as it is a good one."""

    def __init__(self, passes_per_step: Collection[int], size: int) -> None:
        self.excuse: str | None = None
        self._seen = [[_Optimizer(passes) for passes in passes_per_step] for _ in range(size)]
        # By rank: backward passes that an optimizer has stepped with.
        self._stepped: list[set[int]] = [set() for _ in range(size)]
        self._unseen: list[dict[int, str]] = [{} for _ in range(size)]

    def backward(
        self, rank: int, of: int, reached: Collection[str], number: int, *, counts: bool, had: Gradients
    ) -> None:
        """These parameters get gradients; ``had`` are those before."""
        seen = self._seen[rank][of]
        again = [name for name in seen.complete if name in reached]
        if again:
            if not self._is_surplus(rank, of):
                self._refuse("a gradient is computed again after its last pass, and before step()")
            elif any(had[name] is not None for name in seen.complete):
                leave_if_known("surplus gradients")
                self._refuse("a backward pass for another optimizer has left gradients, and zero_grad() was not called")
            elif set(again) != set(reached):
                leave_if_known("surplus gradients of some parameters, set to None")
            seen.forget()
        if reached:
            seen.backwards.add(number)
        if counts:
            for name in reached:
                if had[name] is None:
                    seen.passes.pop(name, None)
                seen.passes[name] = seen.passes.get(name, 0) + 1

    def zero_grad(self, rank: int, of: int) -> None:
        """The optimizer's own."""
        if self._seen[rank][of].complete and not self._is_surplus(rank, of):
            self._refuse("zero_grad() is called after the last backward pass, and before step()")
        self._seen[rank][of].forget()

    def change(
        self, rank: int, of: int, name: str, *, in_place: bool, drops: bool = False, is_sparse: bool = False
    ) -> None:
        """A gradient is changed or replaced by the program."""
        seen = self._seen[rank][of]
        if is_sparse and seen.complete:
            leave_if_known("changes of sparse gradients on their way")
        if drops and self._is_surplus(rank, of):
            return
        if name in seen.complete or (in_place and seen.complete):
            self._refuse("a gradient is changed after the last backward pass, and before step()")
        elif not in_place:
            seen.passes.pop(name, None)

    def settle(self, rank: int, of: int, what: str) -> None:
        """The optimizer does something between two steps."""
        if self._seen[rank][of].complete:
            self._refuse(f"{what} is called after the last backward pass, and before step()")

    def synchronize(self, rank: int, of: int, had: Gradients) -> None:
        seen = self._seen[rank][of]
        if any(had.get(name, None) is None for name in seen.complete):
            self._refuse("gradients were set to None after the last backward pass, and before step()")
        seen.passes.clear()

    def step(self, rank: int, of: int, *, was_taken: bool = True, unseen: str | None = None) -> None:
        """The optimizer is asked to step; ``was_taken``: no GradScaler has skipped it.

        ``unseen``: the known fault for which other optimizers do not take the passes of this step to be used.
        """
        seen = self._seen[rank][of]
        self._stepped[rank] |= seen.backwards
        if unseen is not None:
            self._unseen[rank].update(dict.fromkeys(seen.backwards, unseen))
        if was_taken:
            seen.backwards.clear()
        seen.passes.clear()

    def require_alike(self, ranks: Collection[int], of: int) -> None:
        """Notes that ranks are about to drop gradients, which must be complete on all of them or on none."""
        if len({bool(self._seen[rank][of].complete) for rank in ranks}) > 1:
            self._refuse("surplus gradients of only some ranks are dropped")

    def require_reached(self, reached: Collection[int], ranks: Collection[int], of: int) -> None:
        """Notes which ranks a pass reaches: they drop surplus gradients with all ranks, which may come to others first.

        These may be those of a barrier, or of another optimizer, and then all ranks are told so.
        """
        if 0 < len(reached) < len(ranks) and any(
            self._seen[rank][of].complete and self._is_surplus(rank, of) for rank in ranks
        ):
            self._refuse("a pass on only some ranks drops what a backward pass for another optimizer has left")

    def has_begun(self, rank: int, of: int) -> bool:
        """Whether the optimizer has had a backward pass since its last step."""
        return bool(self._seen[rank][of].backwards)

    def is_complete(self, rank: int, of: int, names: Collection[str]) -> bool:
        """Whether these parameters have had all their passes."""
        return set(names) <= set(self._seen[rank][of].complete)

    def begin_anew(self, ranks: Collection[int], of: int) -> None:
        """A copy of the optimizer goes on, and the optimizer is closed."""
        if len({bool(self._seen[rank][of].complete) for rank in ranks}) > 1:
            self._refuse("an optimizer is given up in the middle of a step, while other ranks send its gradients")
        for rank in ranks:
            self._seen[rank][of].forget()

    def _is_surplus(self, rank: int, of: int) -> bool:
        backwards = self._seen[rank][of].backwards
        is_surplus = bool(backwards) and backwards <= self._stepped[rank]
        for feature in {self._unseen[rank].get(number) for number in backwards} - {None} if is_surplus else ():
            leave_if_known(str(feature))
        return is_surplus

    def _refuse(self, why: str) -> None:
        if self.excuse is None:
            self.excuse = why
