"""
hvdlite trains a PyTorch model on several ranks: it averages the gradients of an optimizer over all of them.

    import hvdlite as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

This module re-exports the public names of the packages below. Packages and modules import only what stands before
them, and within a package its own docstring has the order:

    errors < forks < values < faults < signing < environment < log < outside_graphs < debugger < rendezvous < comm
           < shm < calls < coordinator < control < timeline < compression < runtime < ops < buckets < exchanges
           < steps < updates < optim < elastic < round_trips < balanced_batches < job_log < signal_saver < lightning
           < ray < worker < spark

``__init__.pyi`` and ``shared_names.pyi`` list the public names, for type checkers and for this module. A name is
imported when the program first uses it: `import hvdlite` itself loads none of these packages.

Only `worker.functions` imports hvdlite_launcher, when `run` is called. Three more modules import this one:
`torch`, which has the same functions with Horovod's signatures; `horovod`, with which programs can import them as
`horovod.torch`; and `bench`, the benchmarks.
"""

import ast
import atexit
import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch.distributed as _dist


def read_names(file_name: str) -> dict[str, tuple[str, str | None]]:
    """Returns the names that a stub of this package imports: each with its module, and None if it is that module."""
    stub = ast.parse(Path(__file__).with_name(file_name).read_text(encoding="utf-8"))
    found: dict[str, tuple[str, str | None]] = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.name] = (f".{node.module}", alias.name) if node.module else (f".{alias.name}", None)
    return found


SHARED_NAMES = read_names("shared_names.pyi")
_ORIGIN_OF = SHARED_NAMES | read_names("__init__.pyi")
del _ORIGIN_OF["*"]

__all__ = sorted(_ORIGIN_OF)  # noqa: PLE0605  # type checkers read the stub


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that programs load only the packages that they use."""
    if name == "__version__":
        return importlib.metadata.version("hvdlite")
    if name not in _ORIGIN_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, name_there = _ORIGIN_OF[name]
    module = importlib.import_module(module_name, __name__)
    value = globals()[name] = module if name_there is None else getattr(module, name_there)
    return value


def _make_shm_process_group(*args: Any) -> Any:
    from .shm.backend import ShmProcessGroup  # noqa: PLC0415  # when a program makes one

    return ShmProcessGroup(*args)


def _end_of_program() -> None:
    if world := sys.modules.get(f"{__name__}.runtime.world"):
        world.end_of_program()


# Here, so that after `import hvdlite` a program can pass the backend's name to torch.distributed.
if _dist.is_available() and not hasattr(_dist.Backend, "HVDSHM"):
    _dist.Backend.register_backend("hvdshm", _make_shm_process_group, devices=["cpu"])

# Registered here and not in init(): exit handlers run in reverse order, so this runs after those of the program.
atexit.register(_end_of_program)
