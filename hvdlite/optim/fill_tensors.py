"""
`Filler`: gives an optimizer received or restored values, in the tensors and parameter groups that it has already.

    old value, new value ── a tensor of the same shape, dtype and device ── copied into the old one, which stays
                         ├─ containers ─────────────────────────────────── their entries likewise
                         └─ anything else ──────────────────────────────── the new one

A program may hold such a tensor itself, for example a learning rate that it multiplies, and a captured CUDA graph reads
state by its address. If they were replaced on some ranks alone, the program would change the training of the others.
`optimizer_state` uses it, and `elastic.torch_state` for attributes of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..buckets.plan import is_dense
from ..ops.sendable import check_writable, is_sendable


class Filler:
    """Copies new values into old tensors, of one optimizer at one time.

    Each old tensor takes one new value: where the program has one tensor in two places, and the new values are two, the
    second place gets the new tensor. Where two places have the same new tensor, they share one afterwards.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        """``params`` are the optimizer's parameters, whose memory is never written."""
        # The memory that may not be written (any more): first and last address, by storage.
        self._taken: dict[int, list[tuple[int, int]]] = {}
        # What a new tensor or container has become, by id; with the new one, which keeps its id.
        self._done: dict[int, tuple[Any, Any]] = {}
        for param in params:
            if is_sendable(param):
                storage = param.untyped_storage()
                self._taken[storage.data_ptr()] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes())]

    def fill(self, old: Any, new: Any) -> Any:
        """Returns ``new``, with ``old``'s tensors in place of equal-shaped new ones; changes new containers."""
        if id(new) in self._done:
            return self._done[id(new)][0]
        if isinstance(new, Tensor):
            return self._keep(new, self._copied(old, new))
        if isinstance(new, dict):
            self._keep(new, new)
            for key, value in new.items():
                new[key] = self.fill(old.get(key) if isinstance(old, dict) else None, value)
        elif type(new) in (list, tuple):
            beside = old if type(old) is type(new) and len(old) == len(new) else [None] * len(new)
            if isinstance(new, tuple):
                return tuple(self.fill(*pair) for pair in zip(beside, new, strict=True))
            self._keep(new, new)
            new[:] = [self.fill(*pair) for pair in zip(beside, new, strict=True)]
        return new

    def give_options(self, optimizer: Any, options: Sequence[dict[str, Any]]) -> None:
        """Replaces all options of the parameter groups, which stay the same dictionaries with the same parameters."""
        for entry, given in zip(optimizer.param_groups, options, strict=True):
            members = entry["params"]
            filled = self.fill(entry, given)
            # In place, since a scheduler or wrapper may refer to the same dictionary.
            entry.clear()
            entry.update({"params": members, **filled})

    def give_state(self, optimizer: Any, state: dict[Any, Any]) -> None:
        """Replaces the whole ``optimizer.state``, which stays the same dictionary."""
        filled = self.fill(dict(optimizer.state), state)
        optimizer.state.clear()
        optimizer.state.update(filled)

    def _keep(self, new: Any, kept: Any) -> Any:
        self._done[id(new)] = (kept, new)
        return kept

    def _copied(self, old: Any, new: Tensor) -> Tensor:
        if old is new or not _can_take(old, new):
            return new
        start = old.data_ptr()
        stop = start + old.nbytes
        ranges = self._taken.setdefault(old.untyped_storage().data_ptr(), [])
        if any(start < other_stop and other_start < stop for other_start, other_stop in ranges):
            return new
        ranges.append((start, stop))
        with torch.no_grad():
            old.copy_(new)
        kept: Tensor = old
        return kept


def _can_take(old: Any, new: Tensor) -> bool:
    if type(old) is not Tensor or type(new) is not Tensor or not (is_sendable(old) and is_sendable(new)):
        return False
    form = (old.shape, old.dtype, old.device.type, old.requires_grad)
    if form != (new.shape, new.dtype, new.device.type, new.requires_grad):
        return False
    try:
        check_writable(old, "")
    except ValueError:
        return False
    return is_dense(tuple(old.shape), old.stride())
