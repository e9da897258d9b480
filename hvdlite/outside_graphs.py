"""
`outside_graphs`: has torch.compile run a function as it is, between the graphs that it makes.

    a compiled function ── graph ── optimizer.step(), hvd.allreduce(...) ── graph ── ...

A collective in a graph would run while PyTorch traces it, with tensors that have no values. So modules whose functions
are called by programs, or by autograd, end with `keep_outside_graphs`. This does what ``torch.compiler.disable`` does,
without its wrapper in each call, and without the import of torch._dynamo, which takes seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, TypeVar, cast

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])

_WHY = (
    "hvdlite communicates with other ranks there, which cannot be part of a graph: leave out fullgraph=True, or "
    "compile the model's forward alone"
)
# Neither this code is compiled, nor what it calls.
_AS_THEY_ARE = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def outside_graphs(function: Function) -> Function:
    """Marks the function, and returns it."""
    own: Any = inspect.unwrap(function)
    for each in cast("tuple[Any, Any]", (function, own)):
        # Where such a function is called while PyTorch traces, it ends the graph, with these words.
        each._torchdynamo_disable = True
        each._torchdynamo_disable_msg = _WHY
    # Not the code of `function`: that may be a wrapper's, such as contextmanager's, which others have too.
    eval_frame.set_code_exec_strategy(own.__code__, _AS_THEY_ARE)
    return function


def keep_outside_graphs(names: Mapping[str, Any]) -> None:
    """Marks all functions and methods that a module defines; ``names`` are its ``globals()``."""
    for value in list(names.values()):
        if getattr(value, "__module__", None) == names["__name__"]:
            for function in _functions_of(value):
                # Classes may also have functions that belong to all, such as those of NamedTuple and Protocol.
                if inspect.unwrap(function).__globals__ is names:
                    outside_graphs(function)


def _functions_of(value: Any) -> Iterator[FunctionType]:
    for each in vars(value).values() if isinstance(value, type) else (value,):
        parts = (each.fget, each.fset) if isinstance(each, property) else (getattr(each, "__func__", each),)
        yield from (part for part in parts if isinstance(part, FunctionType))
