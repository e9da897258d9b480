"""
Tensors that cannot travel, and arguments that are none: each call ends on every rank, and leaves the ranks in step.

Well over 4000 calls, of every public function that takes a tensor, a list of them, an object or an optimizer: with
every kind of tensor (`kinds`), and with every argument of a wrong kind. Each works, with the right value, or ends in a
TypeError or ValueError of one sentence that is raised by hvdlite itself; and after each the ranks do an all-reduce.
The ranks are threads of one world, over gloo.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kinds
import pytest
import torch
from kinds import KINDS, Kind
from torch import Tensor, nn
from worlds import run_worlds

import hvdlite as hvd

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _a_mesh() -> Iterator[None]:
    with kinds.a_mesh():
        yield


@dataclass
class Tally:
    """What went wrong, by call; how many calls there were."""

    calls: int = 0
    wrong: list[str] = field(default_factory=list)


# -- how a call ends


def fault_of(error: BaseException, words: Sequence[str]) -> str | None:
    """What is wrong with an error that a call has ended in, or None: it names one of the words, and is hvdlite's."""
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
    """One rank that makes the calls, all ranks the same; what they come to is in its tally."""

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
        """Make a call. ``must``: whether it has to work; None where it may end either way."""
        self.tally.calls += 1
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - it is what is looked at
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


# -- the functions, with kinds of tensors


def bare(value: Tensor) -> Tensor:
    """The values of a traveller, in plain memory of their own."""
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


def total_of(everyones: Sequence[Tensor]) -> Tensor:
    if everyones[0].dtype is torch.bool:
        return torch.stack(list(everyones)).any(0)
    return torch.stack(list(everyones)).sum(0, dtype=everyones[0].dtype)


def share(rows: Tensor, rank: int, size: int) -> Tensor:
    counts = [len(rows) // size + (place < len(rows) % size) for place in range(size)]
    return rows.split(counts)[rank]


Expected = Callable[[Sequence[Tensor], int], Tensor]

SUM: Expected = lambda each, rank: total_of(each)  # noqa: E731 - one of a table
ROWS: Expected = lambda each, rank: torch.cat([t.reshape(1) if t.dim() == 0 else t for t in each])  # noqa: E731
ROOT: Expected = lambda each, rank: each[-1]  # noqa: E731
SCATTERED: Expected = lambda each, rank: share(total_of(each), rank, len(each)).clone()  # noqa: E731
EXCHANGED: Expected = lambda each, rank: torch.cat([share(t, rank, len(each)) for t in each])  # noqa: E731


@dataclass(frozen=True)
class Function:
    """One that takes a tensor, or several of them."""

    call: Callable[..., Any]
    expected: Expected
    options: Mapping[str, Any] = field(default_factory=dict)
    reduces: bool = False
    in_place: bool = False
    needs_rows: bool = False
    grouped: bool = False

    def takes(self, kind: Kind, own: Any) -> bool:
        if not (kind.reduces if self.reduces else kind.moves) or (self.in_place and not kind.writable):
            return False
        return not (self.needs_rows and bare(own).dim() == 0)

    def __call__(self, value: Any, name: str) -> Any:
        options = {key: hvd.size() - 1 if key == "root_rank" else option for key, option in self.options.items()}
        result = self.call([value, torch.ones(2, 2)] if self.grouped else value, name=name, **options)
        return hvd.synchronize(result) if isinstance(result, hvd.Handle) else result


def table() -> dict[str, Function]:
    forms: list[tuple[str, Function]] = []
    total = {"op": hvd.Sum}
    for suffix in ("", "_async"):
        for stem, in_place in ((f"allreduce{suffix}", False), (f"allreduce{suffix}_", True)):
            forms.append((stem, Function(None, SUM, total, reduces=True, in_place=in_place)))
        forms.append((f"reducescatter{suffix}", Function(None, SCATTERED, total, reduces=True, needs_rows=True)))
        forms.append((f"allgather{suffix}", Function(None, ROWS)))
        root = {"root_rank": None}
        for stem, in_place in ((f"broadcast{suffix}", False), (f"broadcast{suffix}_", True)):
            forms.append((stem, Function(None, ROOT, root, in_place=in_place)))
        forms.append((f"alltoall{suffix}", Function(None, EXCHANGED, needs_rows=True)))
    result = {}
    for name, form in forms:
        arguments = {key: getattr(form, key) for key in ("expected", "options", "reduces", "in_place", "needs_rows")}
        result[name] = Function(getattr(hvd, name), **arguments)
        if hasattr(hvd, f"grouped_{name}"):
            result[f"grouped_{name}"] = Function(getattr(hvd, f"grouped_{name}"), grouped=True, **arguments)
    return result


TENSOR_FUNCTIONS = table()


def call_with_kind(rank: Rank, function_name: str, function: Function, kind_name: str) -> None:
    """One call of a function with a tensor of one kind."""
    kind = KINDS[kind_name]
    own = kind.make(rank.rank)
    must = function.takes(kind, own)
    name = f"{function_name} of {kind_name}"

    def check(result: Any) -> str | None:
        everyones = [bare(kind.make(each)) for each in range(hvd.size())]
        first = result[0] if function.grouped else result
        if function.in_place and first is not own:
            return "gave another tensor than the one it was given"
        return difference(first, function.expected(everyones, rank.rank))

    if must and function.needs_rows and not function.reduces and len(bare(own)) % hvd.size():
        must = None
    rank.attempt(name, lambda: kind.around(lambda value: function(value, name), own), check, words=[name], must=must)


def optimizer_over(value: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2)), value], lr=0.1, momentum=0.9)


def close_of(value: Any, **_: Any) -> Any:
    optimizer = hvd.DistributedOptimizer(optimizer_over(value))
    # The other rank is to have its channel too before this one is gone.
    hvd.barrier()
    optimizer.close()
    return value


def state_of(value: Any, **_: Any) -> Any:
    hvd.broadcast_optimizer_state(optimizer_over(value), 0)
    return value


def momentum_of(value: Any, **_: Any) -> Any:
    """What the state holds for a parameter."""
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = value
    hvd.broadcast_optimizer_state(optimizer, 0)
    return value


def entry_of(value: Any, **_: Any) -> Any:
    hvd.broadcast_parameters({"an entry": value, "another": torch.ones(2)}, hvd.size() - 1)
    return value


def normalized(value: Any, **_: Any) -> None:
    hvd.SyncBatchNorm(2, name="a layer")(value)


# Of these it is enough that they end as they should, where no value is given for it.
OTHER_FUNCTIONS: dict[str, tuple[Callable[..., Any], Sequence[str]]] = {
    "DistributedOptimizer": (close_of, ["hvd.DistributedOptimizer: "]),
    "broadcast_optimizer_state": (state_of, ["broadcast_optimizer_state"]),
    "broadcast_optimizer_state, of its momentum": (momentum_of, ["broadcast_optimizer_state"]),
    "broadcast_object": (hvd.broadcast_object, ["broadcast_object of"]),
    "allgather_object": (hvd.allgather_object, ["allgather_object of"]),
    "SyncBatchNorm": (normalized, ["SyncBatchNorm 'a layer'"]),
    "sparse_allreduce_async": (
        lambda value, name: hvd.synchronize(hvd.sparse_allreduce_async(value, name, hvd.Sum)),
        ["sparse_allreduce of"],
    ),
}


def call_others_with_kind(rank: Rank, kind_name: str) -> None:
    kind = KINDS[kind_name]
    for label, (function, words) in OTHER_FUNCTIONS.items() if kind.is_of_thread else ():
        own = kind.make(rank.rank)
        name = f"{label} of {kind_name}"
        if function in (close_of, state_of):
            try:
                optimizer_over(own)
            except Exception:  # noqa: BLE001 - PyTorch's optimizers refuse it themselves
                continue
        if function is momentum_of and not isinstance(own, Tensor):
            continue
        must = None if label != "sparse_allreduce_async" else kind_name == "sparse COO"
        rank.attempt(
            name,
            lambda function=function, own=own, name=name: kind.around(lambda value: function(value, name=name), own),
            lambda result: None,
            words=words,
            must=must,
        )


def call_broadcast_parameters(rank: Rank, kind_name: str) -> None:
    kind = KINDS[kind_name]
    own = kind.make(rank.rank)
    # An entry that is None is left out.
    must = True if kind_name == "None" else kind.moves and kind.writable

    def check(result: Any) -> str | None:
        return None if own is None else difference(result, bare(kind.make(hvd.size() - 1)))

    rank.attempt(
        f"broadcast_parameters of {kind_name}",
        lambda: kind.around(entry_of, own),
        check,
        words=["broadcast_parameters: 'an entry'", "broadcast_parameters: elements of 'an entry'"],
        must=must,
    )


def calls_with_all_kinds(rank: int) -> Tally:
    caller = Rank(rank)
    for kind_name in KINDS:
        for function_name, function in TENSOR_FUNCTIONS.items():
            call_with_kind(caller, function_name, function, kind_name)
        call_broadcast_parameters(caller, kind_name)
        call_others_with_kind(caller, kind_name)
    return caller.tally


def require_sound(tallies: Sequence[Tally], at_least: int) -> None:
    assert not [fault for tally in tallies for fault in tally.wrong]
    assert min(tally.calls for tally in tallies) >= at_least


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_every_kind_travel_or_are_refused_in_one_sentence():
    require_sound(run_worlds(2, calls_with_all_kinds), at_least=3000)
