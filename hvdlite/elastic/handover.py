"""
`hand_over`: gives all ranks the state of rank 0, in one operation: its large tensors only to those that need them.

    rank 0 ── values, as `ops.typed_values` ─────────── to all
           ── small and local tensors, such as buffers ── to all
           ── parameters, optimizers' state ───────────── to those whose state is another, straight into their memory

Each rank says which state it has: the number of its last commit, if it is there. Ranks that have another one than rank
0, such as new ones, get everything. The others only get what could differ by rank. All leave together, so that a rank
that is lost meanwhile is an error on all of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ..calls.operation import ELASTIC_STATE, Execution, Operation
from ..faults import point
from ..log import log
from ..ops.base import submit
from ..ops.broadcast import broadcast_tensors
from ..ops.typed_values import ValueDecoder, ValueEncoder, room_for
from ..runtime.functions import global_process_set, group_of

# For the names of groups, which must be new in a generation.
_numbers = itertools.count()


class InPlace(NamedTuple):
    """A tensor that is overwritten where it is; ``is_equal`` on all ranks that have the same state."""

    name: str
    tensor: Tensor
    is_equal: bool


class Handed:
    """An object of the state, as `hand_over` needs it."""

    def what_is_equal(self) -> Mapping[str, Any]:
        """Returns what must be equal on all ranks: JSON values."""
        return {}

    def in_place(self) -> Sequence[InPlace]:
        """Returns the tensors that are overwritten, in an order that is equal on all ranks."""
        return []

    def params(self) -> Sequence[Tensor]:
        """Returns the parameters to which sent tensors may belong."""
        return []

    def encode(self, encoder: ValueEncoder) -> Any:
        """Returns everything else as JSON, with its tensors in the encoder. Called on rank 0, and then `given`."""
        raise NotImplementedError

    def given(self) -> None:
        """Does nothing unless overridden."""

    def take(self, tree: Any, decoder: ValueDecoder, *, is_whole: bool) -> None:
        """Takes what `encode` has returned on rank 0. Unless ``is_whole``, parameters' tensors have not been sent."""
        raise NotImplementedError


class Receipt(NamedTuple):
    """What `hand_over` has done: whether this rank has received everything, and rank 0's number of commits."""

    is_whole: bool
    commits: int


def hand_over(
    handed: Mapping[str, Handed], own_state: Any, commits: int, name_of: Callable[[str], str] = str
) -> Receipt:
    """Gives all ranks the state of rank 0. Every rank must call it, with the same names, and waits for all.

    ``own_state`` says which state this rank has, as JSON, equal on ranks with equal states; None if it has none.
    ``commits`` is a number of rank 0 for all. ``name_of`` returns an object's name in messages. A MismatchError if the
    objects have different parameters, and a TypeError if a value cannot be sent, on every rank.
    """
    what = ELASTIC_STATE.name
    group = group_of(global_process_set, what)
    is_root = group.rank == 0
    in_place = {name: each.in_place() for name, each in handed.items()}
    same: dict[str, Any] = {
        "tensors": [
            [f"{name}.{entry}" if name else entry, list(tensor.shape), str(tensor.dtype), tensor.device.type]
            for name, entries in in_place.items()
            for entry, tensor, _ in entries
        ]
    }
    for name, each in handed.items():
        same |= {f"{key} of {name_of(name)}": value for key, value in each.what_is_equal().items()}
    params = {name: each.params() for name, each in handed.items()}
    sent = {name: ValueEncoder() for name in handed}
    header, error = _header(handed, sent, commits, name_of) if is_root else (None, None)

    def run(execution: Execution) -> tuple[dict[str, Any], dict[str, list[Tensor]], bool]:
        told = json.loads(execution.group.broadcast_signed(header, 0, execution.what))
        if "error" in told:
            return told, {}, False
        root_state = execution.owns[0]
        behind = [rank for rank, each in enumerate(execution.owns) if rank and (each is None or each != root_state)]
        is_whole = group.rank in behind
        to_all = [tensor for entries in in_place.values() for _, tensor, is_equal in entries if not is_equal]
        to_those = [tensor for entries in in_place.values() for _, tensor, is_equal in entries if is_equal]
        tensors = {}
        for name, (_, metas) in told["objects"].items():
            # Those of parameters' states are equal where the rest is.
            is_for_all = [owner < 0 for *_, owner in metas]
            room = sent[name].tensors
            if not is_root:
                wanted = [meta for meta, is_wanted in zip(metas, is_for_all, strict=True) if is_whole or is_wanted]
                found = iter(room_for(wanted, params[name]))
                room = [next(found) if is_whole or is_wanted else _NOT_SENT for is_wanted in is_for_all]
            tensors[name] = room
            for tensor, is_wanted in zip(room, is_for_all, strict=True):
                (to_all if is_wanted else to_those).append(tensor)
        broadcast_tensors(to_all, 0, execution)
        if is_whole or (is_root and behind):
            _broadcast_among([0, *behind], to_those, execution, told["number"])
        # So that all know of a rank that is lost by then.
        execution.group.agree(None, execution.what)
        return told, tensors, is_whole

    operation = Operation(ELASTIC_STATE, run, None, same, own_state)
    used = [tensor for entries in in_place.values() for _, tensor, _ in entries]
    used += [tensor for each in sent.values() for tensor in each.tensors]
    told, tensors, is_whole = submit(operation, global_process_set, used).wait()
    if "error" in told:
        raise TypeError(told["error"]) from error
    if is_root:
        for each in handed.values():
            each.given()
    else:
        sender = group.describe_rank(0)
        for name, (tree, _) in told["objects"].items():
            decoder = ValueDecoder(tensors[name], sender, f"{what} of {name_of(name)}", params[name])
            handed[name].take(tree, decoder, is_whole=is_whole)
    return Receipt(is_whole, told["commits"])


# Takes the place of a tensor that is not sent to this rank.
_NOT_SENT = Tensor()


def _header(
    handed: Mapping[str, Handed], sent: Mapping[str, ValueEncoder], commits: int, name_of: Callable[[str], str]
) -> tuple[bytes, Exception | None]:
    """Returns what is sent to all before the tensors, and the error if a value cannot be sent."""
    objects, pickled = {}, []
    try:
        for name, each in handed.items():
            encoder = sent[name]
            objects[name] = [each.encode(encoder), encoder.metas]
            pickled += [f"{name_of(name)}: {place}" for place in encoder.pickled]
    except Exception as error:  # noqa: BLE001 - whatever the methods of an object raise
        # Sent in place of the state, so that no rank waits for it for ever.
        words = f"{name_of(name)}: an attribute cannot be sent to other ranks: {error}"
        return json.dumps({"error": words}).encode(), error
    if pickled:
        log.info("elastic: sent as pickles, since their types are not known: %s", ", ".join(pickled))
    return json.dumps({"objects": objects, "commits": commits, "number": next(_numbers)}).encode(), None


def _broadcast_among(ranks: Sequence[int], tensors: list[Tensor], execution: Execution, number: int) -> None:
    point("handover")
    if len(ranks) == execution.group.size:
        broadcast_tensors(tensors, 0, execution)
        return
    group = execution.group.part(ranks, token=f"{execution.group.label}.state{number}")
    try:
        broadcast_tensors(tensors, 0, replace(execution, group=group))
        # A rank that closes its engine must not be taken for one that is lost.
        group.agree(None, execution.what)
    finally:
        group.close()
