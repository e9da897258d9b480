"""Makes the same calls on every rank, checks how each ends, and checks that the ranks stay in step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import hvdlite as hvd


@dataclass
class Tally:
    """The number of calls made, and a line for each that ended wrongly."""

    calls: int = 0
    wrong: list[str] = field(default_factory=list)


# -- how a call ends


def fault_of(error: BaseException, words: Sequence[str]) -> str | None:
    """Returns what is wrong with the error that a call raised, or None.

    It must be a TypeError or ValueError raised by hvdlite, in one sentence that contains one of ``words``.
    """
    text = str(error)
    if not isinstance(error, TypeError | ValueError):
        return f"ended in {type(error).__name__}: {text}"
    if not any(word in text for word in words):
        return f"does not say what it is about: {text}"
    if "\n" in text or len(text) > 700:
        return f"is no one sentence: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if "/hvdlite/" not in frames[-1].filename:
        return f"was raised in {frames[-1].filename}: {text}"
    return None


class Rank:
    """One rank's caller: every rank makes the same calls, and notes the results in its tally."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tally = Tally()

    def attempt(
        self,
        label: str,
        call: Callable[[], Any],
        check: Callable[[Any], str | None],
        *,
        words: Sequence[str],
        must: bool | None,
    ) -> None:
        """Makes a call and checks its result.

        ``must``: True if the call must succeed, False if it must raise, None if both are right.
        """
        self.tally.calls += 1
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - the error is what is tested
            fault = fault_of(error, words)
            if fault is None and must:
                fault = f"was refused: {error}"
        else:
            fault = "was not refused" if must is False else check(result)
        if fault is not None:
            self.tally.wrong.append(f"rank {self.rank}: {label} {fault}")
        self.is_in_step(label)

    def is_in_step(self, label: str) -> None:
        total = hvd.allreduce(torch.tensor([float(self.tally.calls), self.rank + 1.0]), op=hvd.Sum, name="in step?")
        size = hvd.size()
        expected = [float(self.tally.calls) * size, size * (size + 1) / 2]
        assert total.tolist() == expected, f"after {label} the ranks are out of step; before: {self.tally.wrong}"


def bare(value: Tensor) -> Tensor:
    """Returns the values as a plain tensor in its own contiguous memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(Tensor).contiguous().resolve_conj().resolve_neg().clone()


def difference(found: Any, expected: Tensor) -> str | None:
    if not isinstance(found, Tensor):
        return f"gave a {type(found).__name__}"
    found = bare(found)
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"gave {found.dtype} of {tuple(found.shape)}, not {expected.dtype} of {tuple(expected.shape)}"
    if found.numel() and not torch.equal(found.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)):
        return f"gave {found.flatten()[:8]}, not {expected.flatten()[:8]}"
    return None
