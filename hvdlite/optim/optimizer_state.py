"""
`broadcast_optimizer_state`: sends an optimizer's state from the root to all ranks: options, momenta, step counters.

    options, states ── as typed values, without their tensors ── broadcast ── with tensors on this rank's devices
              tensors ── as bytes, in a few broadcasts ──┘

Only objects of types that `ops.typed_values` does not know are pickled.

The optimizer's ``param_groups`` and ``state`` are copied directly, since ``load_state_dict()`` would cast every tensor
to the parameter's dtype. ``state_dict()`` is used only for optimizers that override it. Ranks first compare the shapes
of their parameters and the classes of their optimizers, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..buckets.plan import is_dense
from ..calls.operation import BROADCAST_OPTIMIZER_STATE, Execution, Operation
from ..ops.base import submit
from ..ops.broadcast import broadcast_tensors, digest_of
from ..ops.sendable import check_sendable, check_writable, is_sendable
from ..ops.typed_values import NOBODY, ValueDecoder, ValueEncoder, room_for
from ..outside_graphs import keep_outside_graphs
from ..runtime.functions import global_process_set, group_of
from ..runtime.process_set import ProcessSet
from ..values import shown
from .optimizer_proxy import OptimizerProxy


class Filler:
    """Copies new values into old tensors, of one optimizer at one time, as far as shape, dtype and device are equal.

    A program may hold such a tensor itself, for example a learning rate that it multiplies, and a captured CUDA graph
    reads state by its address. Each old tensor takes one new value: where the program has one tensor in two places, and
    the new values are two, the second place gets the new tensor.
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

    def give(self, optimizer: Any, options: Sequence[dict[str, Any]], state: dict[Any, Any] | None) -> None:
        """Replaces all options of the groups, which keep their parameters; and the whole state, unless that is None.

        Both stay the same dictionaries, since a scheduler or wrapper may refer to them.
        """
        for entry, given in zip(optimizer.param_groups, options, strict=True):
            members = entry["params"]
            filled = self.fill(entry, given)
            entry.clear()
            entry.update({"params": members, **filled})
        if state is not None:
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


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # unused: Horovod takes a step here, and needs it for that
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Sends the root's optimizer state to every rank: learning rates, momenta, step counters.

    Every rank must call it. Afterwards each rank has exactly the root's options of parameter groups and state of
    parameters. Values keep their types, and tensors their dtypes. They are copied into the tensors that the rank has in
    their places, such as a learning rate that is a tensor. (``load_state_dict`` replaces such tensors: where only the
    root has called it, take the tensor from ``param_groups`` again.) ``optimizer.defaults`` are not sent, as in
    Horovod.

    Takes no step and changes no parameter. ``model`` is ignored, and accepted since Horovod has it. Raises
    `MismatchError` on every rank if the ranks' parameters have different shapes or groups, or if their optimizers have
    different classes. Several threads may call it at once for optimizers whose parameters have different shapes.
    """
    kind = BROADCAST_OPTIMIZER_STATE.name
    own = unwrapped(optimizer, kind)
    group = group_of(process_set, kind)
    root = group.group_rank_of_root(root_rank, kind)
    params = params_of(optimizer)
    same = {"root_rank": group.ranks[root], **what_is_equal(own)}
    is_root = group.rank == root
    data: bytes | None = None
    sent, error = ValueEncoder(), None
    if is_root:
        try:
            require_undivided(optimizer, kind)
            encoded = encode_state(own, sent)
            data = json.dumps([encoded, sent.metas]).encode()
        except Exception as caught:  # noqa: BLE001 - whatever the methods of an object raise
            # Sent in place of the state, so that no rank waits for it for ever.
            error, sent = caught, ValueEncoder()
            data = json.dumps([str(caught), []]).encode()

    def run(execution: Execution) -> tuple[Any, list[Tensor]]:
        tree, metas = json.loads(execution.group.broadcast_signed(data, root, execution.what))
        tensors = sent.tensors if is_root else room_for(metas, params)
        broadcast_tensors(tensors, root, execution)
        return tree, tensors

    name = digest_of(list(same.values())[1:])
    operation = Operation(BROADCAST_OPTIMIZER_STATE, run, name, same, has_users_name=False)
    tree, tensors = submit(operation, process_set, [*params, *sent.tensors]).wait()
    sender = group.describe_rank(root)
    if isinstance(tree, str):
        raise TypeError(f"{kind}: the state of {sender} cannot be sent: {tree}") from error
    if not is_root:
        take_state(tree, ValueDecoder(tensors, sender, kind, params), own)


def what_is_equal(optimizer: Any) -> dict[str, Any]:
    """Returns what must be equal on all ranks, as in `Operation`: an unwrapped optimizer's class, and shapes."""
    for entry in optimizer.param_groups:
        for param in entry["params"]:
            # Other parameters are not sent themselves: only their shapes are needed.
            if torch.nn.parameter.is_lazy(param) or param.is_nested:
                check_sendable(param, BROADCAST_OPTIMIZER_STATE.name, "a parameter")
    return {
        "class": type(optimizer).__qualname__,
        "(parameter shapes by parameter group)": [
            [list(param.shape) for param in entry["params"]] for entry in optimizer.param_groups
        ],
    }


def require_undivided(optimizer: Any, kind: str) -> None:
    """Raises ValueError if this rank has a part alone of the state of an optimizer with ``shard=``."""
    if isinstance(optimizer, OptimizerProxy) and optimizer._states.holds_parts:
        raise ValueError(
            f"{kind}: with shard={optimizer.shard!r} each rank has a part alone of the optimizer's state, and all "
            "are of one state already; what load_state_dict() has loaded is sent"
        )


def unwrapped(optimizer: Any, kind: str) -> Any:
    """Returns the optimizer, unwrapped. Raises ValueError for LBFGS, and TypeError for anything but an optimizer."""
    if isinstance(optimizer, torch.optim.LBFGS):
        # Horovod's words.
        raise ValueError("cannot broadcast torch.optim.LBFGS state: hvdlite does not support this optimizer")
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise TypeError(
            f"{kind}: optimizer={shown(optimizer)} is not a torch.optim.Optimizer: pass the optimizer itself"
        )
    return optimizer._optimizer if isinstance(optimizer, OptimizerProxy) else optimizer


def encode_state(optimizer: Any, encoder: ValueEncoder) -> list[Any]:
    """Returns an unwrapped optimizer's state as JSON, for `take_state`.

    A TypeError names a value that cannot be sent.
    """
    params = params_of(optimizer)
    encoder.number_of = {id(param): number for number, param in enumerate(params)}
    try:
        if not is_plain_optimizer(optimizer):
            return [False, encoder.encode(optimizer.state_dict(), "state_dict()")]
        options = [_options_of(entry) for entry in optimizer.param_groups]
        rest = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        states: list[Any] = []
        tree = [True, encoder.encode(options, "param_groups"), states, encoder.encode(rest, "state")]
        for number, param in enumerate(params):
            if param in optimizer.state:
                encoder.owner = number
                states.append([number, encoder.encode(optimizer.state[param], f"state of parameter {number}")])
        return tree
    finally:
        encoder.number_of, encoder.owner = {}, NOBODY


def take_state(tree: Sequence[Any], decoder: ValueDecoder, optimizer: Any, *, is_whole: bool = True) -> None:
    """Gives an optimizer, unwrapped, what `encode_state` has encoded.

    Unless ``is_whole``, a rank whose state is equal already takes the options alone; but all of a ``state_dict`` of the
    optimizer's own.
    """
    # In the order in which they were encoded.
    value = decoder.decode(tree[1])
    if not tree[0]:
        with loading_in_place(optimizer):
            optimizer.load_state_dict(value)
        return
    params, state = params_of(optimizer), None
    if is_whole:
        rest = decoder.decode(tree[3])
        state = {params[number]: decoder.decode(each) for number, each in tree[2]} | rest
    Filler(params).give(optimizer, value, state)


@contextmanager
def loading_in_place(optimizer: Any) -> Iterator[None]:
    """A context for ``load_state_dict``, after which tensors and groups are the earlier ones, with the loaded values.

    What is loaded must be copies that nobody else has. Of an optimizer that overrides ``load_state_dict`` only the
    options keep their tensors.
    """
    optimizer = optimizer._optimizer if isinstance(optimizer, OptimizerProxy) else optimizer
    groups, state = list(optimizer.param_groups), dict(optimizer.state) if is_plain_optimizer(optimizer) else {}
    options = [dict(entry) for entry in groups]
    yield
    filler = Filler(params_of(optimizer))
    for entry, earlier in zip(optimizer.param_groups, options, strict=True):
        entry.update(filler.fill(earlier, _options_of(entry)))
    if is_plain_optimizer(optimizer):
        for entry, loaded in zip(groups, optimizer.param_groups, strict=True):
            if entry is not loaded:
                entry.clear()
                entry.update(loaded)
        optimizer.param_groups[:] = groups
        loaded_state = filler.fill(state, dict(optimizer.state))
        optimizer.state.update(loaded_state)


def params_of(optimizer: Any) -> list[Tensor]:
    """Returns the parameters of all groups, in their order."""
    return [param for entry in optimizer.param_groups for param in entry["params"]]


def _options_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "params"}


def is_plain_optimizer(optimizer: Any) -> bool:
    """Whether it overrides neither ``state_dict`` nor ``load_state_dict``, so that groups and state are all it has."""
    return isinstance(optimizer, torch.optim.Optimizer) and all(
        getattr(getattr(optimizer, name), "__func__", None) is getattr(torch.optim.Optimizer, name)
        for name in ("state_dict", "load_state_dict")
    )


keep_outside_graphs(globals())
