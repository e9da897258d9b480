"""
Tensors that cannot travel, and arguments that are none: each call ends on every rank, and leaves the ranks in step.

More than 6000 calls, of every public function that takes a tensor, a list of them, an object or an optimizer: with
every kind of tensor (`kinds`), and with every argument of a wrong kind. Each works, with the right value, or ends in a
TypeError or ValueError of one sentence that is raised by hvdlite itself; and after each the ranks do an all-reduce.
The ranks are threads of one world, over gloo.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kinds
import pytest
import torch
from calls import Rank, Tally, bare, difference, fault_of
from kinds import KINDS, Kind
from torch import Tensor, nn
from worlds import run_worlds
from wrong_values import RIGHT, WRONG

import hvdlite as hvd
import hvdlite.torch as horovod


@pytest.fixture(autouse=True)
def _a_mesh() -> Iterator[None]:
    with kinds.a_mesh():
        yield


# -- the functions, with kinds of tensors


def total_of(everyones: Sequence[Tensor]) -> Tensor:
    if everyones[0].dtype is torch.bool:
        return torch.stack(list(everyones)).any(0)
    return functools.reduce(torch.add, everyones)


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
    """A function that takes a tensor or several."""

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
        result = self.call([value, torch.ones(2, 2, device="cpu")] if self.grouped else value, name=name, **options)
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
    """Calls a function with a tensor of one kind."""
    kind = KINDS[kind_name]
    own = kind.make(rank.rank)
    must = function.takes(kind, own)
    name = f"{function_name} of {kind_name}"

    def check(result: Any) -> str | None:
        everyones = [bare(kind.make(each)) for each in range(hvd.size())]
        # alltoall_async returns the received splits too.
        first = result[0] if function.grouped or function_name == "alltoall_async" else result
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
    # The other rank must have its engine too before this one is closed.
    hvd.barrier()
    optimizer.close()
    return value


def state_of(value: Any, **_: Any) -> Any:
    hvd.broadcast_optimizer_state(optimizer_over(value), 0)
    return value


def momentum_of(value: Any, **_: Any) -> Any:
    """Returns the value in the optimizer's state for a parameter."""
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = value
    hvd.broadcast_optimizer_state(optimizer, 0)
    return value


def entry_of(value: Any, **_: Any) -> Any:
    hvd.broadcast_parameters({"an entry": value, "another": torch.ones(2, device="cpu")}, hvd.size() - 1)
    return value


def normalized(value: Any, **_: Any) -> None:
    hvd.SyncBatchNorm(2, name="a layer", device="cpu")(value)


# For these it suffices that they end as they must, if no value is given here.
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
        words=[
            "broadcast_parameters: 'an entry'",
            "broadcast_parameters: elements of 'an entry'",
            "broadcast_parameters: called inside",
        ],
        must=must,
    )


def calls_with_all_kinds(rank: int, kind_names: Iterable[str] = KINDS) -> Tally:
    caller = Rank(rank)
    for kind_name in kind_names:
        for function_name, function in TENSOR_FUNCTIONS.items():
            call_with_kind(caller, function_name, function, kind_name)
        call_broadcast_parameters(caller, kind_name)
        call_others_with_kind(caller, kind_name)
    return caller.tally


def require_sound(tallies: Sequence[Tally], at_least: int) -> None:
    assert not [fault for tally in tallies for fault in tally.wrong]
    assert min(tally.calls for tally in tallies) >= at_least


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_tensors_of_every_kind_travel_or_are_refused_in_one_sentence():
    require_sound(run_worlds(2, calls_with_all_kinds), at_least=3000)


SOME_KINDS = ["plain", "conjugated", "negated", "expanded", "of length 0", "torch.float8_e5m2", "quint8", "sparse CSR"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [1, 3])
def test_some_kinds_do_so_among_any_number_of_ranks(size):
    tallies = run_worlds(size, lambda rank: calls_with_all_kinds(rank, SOME_KINDS))
    require_sound(tallies, at_least=200)


@pytest.mark.filterwarnings("ignore")
def test_a_rank_that_alone_passes_what_cannot_travel_is_told_and_may_pass_something_else():
    def rank(rank: int) -> list[float]:
        if rank == 1:
            with pytest.raises(TypeError, match="allreduce of 'a': the tensor is quantized"):
                hvd.allreduce(KINDS["quint8"].make(rank), name="a", op=hvd.Sum)
        return hvd.allreduce(torch.ones(1), name="a", op=hvd.Sum).tolist()

    assert run_worlds(2, rank) == [[2.0], [2.0]]


@pytest.mark.parametrize("op", [hvd.Max, hvd.Product])
def test_a_tensor_of_inference_mode_may_be_in_a_group_with_one_that_requires_a_gradient(op):
    def rank(rank: int) -> list[float]:
        trained = torch.full((2,), 1.0 + rank, requires_grad=True)
        hvd.grouped_allreduce([KINDS["of inference mode"].make(rank), trained], op=op)[1].sum().backward()
        return trained.grad.tolist()

    assert run_worlds(2, rank) == [[1.0, 1.0]] * 2


def test_every_function_that_takes_a_tensor_is_among_those_that_are_called():
    takers = {name for name in hvd.__all__ if {"tensor", "tensors", "params"} & set(parameters(getattr(hvd, name)))}
    assert takers == {*TENSOR_FUNCTIONS, "broadcast_parameters", "sparse_allreduce_async"}


# -- the functions, with arguments of every kind


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


# The arguments of a function besides the one that is tested.
GIVEN: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(8.0).view(4, 2) + hvd.rank(),
    "tensors": lambda: [torch.arange(8.0).view(4, 2) + hvd.rank(), torch.ones(2)],
    "root_rank": lambda: 0,
    "params": lambda: {"a": torch.ones(2)},
    "optimizer": lambda: torch.optim.SGD([weight()], lr=0.1),
    "num_features": lambda: 2,
    "sync_every": lambda: 100,
}
# Where the function has no default for them, or where they must be given to tell two cases apart.
GIVEN_TO: dict[str, dict[str, Callable[[], Any]]] = {
    "sparse_allreduce_async": {
        "tensor": lambda: torch.ones(2).to_sparse(), "name": lambda: "sparse", "op": lambda: hvd.Sum,
    },
    "broadcast_object": {"obj": hvd.rank},
    "allgather_object": {"obj": hvd.rank},
}  # fmt: skip
# In these functions the argument means something else, or is PyTorch's own.
LEFT_OUT = {("SyncBatchNorm", "device"), ("sparse_allreduce_async", "average"), ("broadcast_optimizer_state", "model")}
# The key in `WRONG` where a function's argument has another name there, or other wrong values.
NAMED_OTHERWISE = {("add_process_set", "process_set"): "ranks_or_comm", ("remove_process_set", "process_set"): "handle"}
# The name that errors of these functions have for them, where it is another.
OF_THEMSELVES = {"add_process_set": "ProcessSet", "remove_process_set": "remove_process_set"}


def functions() -> dict[str, Callable[..., Any]]:
    """Returns all public functions that take an argument for which there are wrong values."""
    apart = {"run", "init", "start_timeline", "join", "load_checkpoint", "save_checkpoint", "Handle", "Compressor"}
    found = {}
    for name in hvd.__all__:
        function = getattr(hvd, name)
        if callable(function) and name not in apart and set(parameters(function)) & set(WRONG):
            found[name] = function
    return found


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def given(name: str, function: Callable[..., Any], /, **changed: Any) -> dict[str, Any]:
    made = {**GIVEN, **GIVEN_TO.get(name, {})}
    needed = {
        key
        for key, parameter in parameters(function).items()
        if parameter.default is inspect.Parameter.empty or key in GIVEN_TO.get(name, {})
    }
    return {**{key: made[key]() for key in needed - changed.keys() if key in made}, **changed}


def finished(result: Any) -> Any:
    """Returns the final result of a call; for an optimizer, whether there is one."""
    if isinstance(result, hvd.Handle):
        return finished(hvd.synchronize(result))
    if isinstance(result, hvd.DistributedOptimizer):
        hvd.barrier()
        result.close()
        return "an optimizer"
    if isinstance(result, hvd.SyncBatchNorm):
        return result(torch.ones(2, 2) + hvd.rank())
    return list(result) if isinstance(result, tuple) else result


def apart(found: Any, expected: Any) -> str | None:
    if isinstance(expected, list):
        pairs = zip(found, expected, strict=True)
        return next((fault for one, other in pairs if (fault := apart(one, other)) is not None), None)
    if isinstance(expected, Tensor):
        if expected.is_sparse:
            found, expected = found.to_dense(), expected.to_dense()
        return difference(found, bare(expected))
    return None if found == expected else f"gave {found!r}, not {expected!r}"


def calls_with_all_arguments(rank: int) -> Tally:
    caller = Rank(rank)
    for name, function in functions().items():
        for argument in parameters(function):
            kind = NAMED_OTHERWISE.get((name, argument), argument)
            if kind not in WRONG or (name, argument) in LEFT_OUT:
                continue
            words = [argument, name.removesuffix("_").removesuffix("_async"), OF_THEMSELVES.get(name, name)]
            for number, value in enumerate(WRONG[kind]):
                caller.attempt(
                    f"{name}({argument}=number {number}, a {type(value).__name__})",
                    lambda f=function, n=name, a=argument, v=value: finished(f(**given(n, f, **{a: v}))),
                    lambda result: None,
                    words=words,
                    must=False,
                )
            for value, meant in RIGHT.get(kind, ()):
                caller.attempt(
                    f"{name}({argument}={type(value).__name__})",
                    lambda f=function, n=name, a=argument, v=value: finished(f(**given(n, f, **{a: v}))),
                    lambda result, f=function, n=name, a=argument, v=meant: apart(
                        result, finished(f(**given(n, f, **{a: v})))
                    ),
                    words=words,
                    must=True,
                )
    return caller.tally


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_arguments_of_every_kind_are_taken_or_refused_in_one_sentence():
    require_sound(run_worlds(2, calls_with_all_arguments), at_least=2785)


@pytest.mark.filterwarnings("ignore")
def test_timelines_are_refused_names_that_no_file_can_have_on_every_rank(tmp_path):
    def calls(rank: int) -> Tally:
        caller = Rank(rank)
        for number, value in enumerate(WRONG["file_path"]):
            label = f"start_timeline(file_path=number {number})"
            caller.attempt(
                label, lambda v=value: hvd.start_timeline(v), lambda result: None, words=["start_timeline"], must=False
            )
        hvd.start_timeline(tmp_path / "\N{SNOWMAN}.json")
        caller.is_in_step("start_timeline")
        hvd.stop_timeline()
        return caller.tally

    require_sound(run_worlds(2, calls), at_least=len(WRONG["file_path"]))
    assert [path.name for path in tmp_path.iterdir()] == ["\N{SNOWMAN}.json"]


def refusal(call: Callable[[], Any], words: Sequence[str]) -> str | None:
    """Returns what is wrong with the end of a call without other ranks, which must be refused."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        return fault_of(error, words)
    return "was not refused"


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        *((hvd.init, argument) for argument in ("timeout_s", "process_sets", "hierarchical", "check_parameters")),
        *((hvd.join, argument) for argument in ("device", "average")),
        (hvd.ProcessSet, "ranks_or_comm"),
        (horovod.init, "comm"),
    ],
)
def test_functions_that_are_called_alone_refuse_arguments_of_a_wrong_kind(function, argument):
    for value in WRONG[argument]:
        fault = refusal(
            lambda value=value: function(**{argument: value}), [argument, function.__name__, "hvd.ProcessSet"]
        )
        assert fault is None, (function, argument, type(value), fault)
    assert not hvd.is_initialized()
