"""
`save_checkpoint`, `load_checkpoint`: one file for a job of any number of ranks, which rank 0 alone writes and reads.

    save   all ranks: consolidate, random states ──► rank 0: state_dict of each ── write
    load   rank 0: read ── broadcast ──► all ranks: load_state_dict of each, random states

The file is replaced as a whole: a process that is killed meanwhile, or a full disk, leaves it as it was. It is a dict
by the names of what was saved, which ``torch.load(weights_only=True)`` reads too: it runs no code. Under the key
"hvdlite" are the number of ranks, and each rank's random states. An error on rank 0 is sent in place of what the others
wait for, and each rank tells the others whether it has loaded: all of them raise, or none.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import pickle
import random
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..calls.operation import LOAD_CHECKPOINT, Execution, Operation
from ..comm.group import Group
from ..errors import MismatchError
from ..log import log
from ..ops.base import submit
from ..ops.broadcast import allgather_object, broadcast_object, broadcast_tensors
from ..ops.typed_values import ValueDecoder, ValueEncoder, room_for
from ..outside_graphs import keep_outside_graphs
from ..runtime.functions import global_process_set, group_of
from ..runtime.process_set import ProcessSet

_SAVE = "save_checkpoint"
_OWN, _SIZE = "hvdlite", "size"
# What learning-rate schedulers keep that may have been chosen by the number of ranks.
_OF_SCHEDULES = ("base_lrs", "T_max", "T_0", "total_steps", "total_iters", "step_size", "milestones", "last_epoch")


def save_checkpoint(
    path: str | os.PathLike[str],
    /,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    process_set: ProcessSet = global_process_set,
    **mine: Any,
) -> None:
    """Saves the state of training in one file: of rank 0, with the random states of all ranks.

    Every rank must call it, between two steps; it waits for all. Rank 0 writes the file (of a process set: its first
    rank), as a whole or not at all: whatever happens meanwhile, the file is the one before or the new one. It creates
    no directory. Of an object that has a ``state_dict`` method, that is saved: of the model, the optimizer (wrapped or
    not) and the scheduler, and of others in ``mine``, such as a second model, an average of the model, or a
    GradScaler. All else in ``mine`` must be tensors, numbers, texts, or lists and dicts of these: it is returned by
    `load_checkpoint`.

    What a compression or outer steps have kept on each rank is saved as by
    `DistributedOptimizer.consolidate_state_dict`. Buffers of the model, such as BatchNorm's statistics, are rank 0's.
    Raises on every rank: OSError if the file cannot be written, TypeError for a value that cannot be loaded again.
    """
    path = os.fspath(path)
    named = _named(_SAVE, model, optimizer, scheduler, mine)
    group = group_of(process_set, _SAVE)
    for value in named.values():
        if (consolidate := getattr(value, "consolidate_state_dict", None)) is not None:
            consolidate(to=group.ranks[0])
    randoms = allgather_object(_random_states(), name=f"{_SAVE}: random states", process_set=process_set)
    error: Exception | None = None
    if group.rank == 0:
        try:
            content = {name: value.state_dict() if _has_state(value) else value for name, value in named.items()}
            write(path, {**content, _OWN: {_SIZE: group.size, "random": randoms}})
        except Exception as caught:  # noqa: BLE001  # whatever the methods of an object raise
            error = caught
    told = broadcast_object(_told(error), group.ranks[0], f"{_SAVE}: outcome", process_set)
    _raise_told(told, error)


def load_checkpoint(
    path: str | os.PathLike[str],
    /,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    process_set: ProcessSet = global_process_set,
    **mine: Any,
) -> dict[str, Any]:
    """Loads what `save_checkpoint` has saved into these objects on all ranks, and returns the other values by name.

    Every rank must call it, with the same names; it waits for all. Rank 0 alone reads the file, with
    ``torch.load(weights_only=True)``, and sends it to the others. Afterwards all ranks have the same parameters, so
    that no broadcast is needed; and if there are as many as when it was saved, each has its own random states again:
    PyTorch's, NumPy's and Python's. ``"size"`` in the returned dict is the number of ranks that saved it, None if the
    file does not say. Where there are others now, rank 0 warns once, and names what may depend on that number.

    Raises on every rank: FileNotFoundError if rank 0 has no such file, another OSError if it cannot be read, ValueError
    if it is no checkpoint or has nothing of one of these names, and MismatchError if it does not fit what some rank
    has; then objects may be loaded in part.
    """
    path = os.fspath(path)
    named = _named(LOAD_CHECKPOINT.name, model, optimizer, scheduler, mine)
    for name, value in named.items():
        if not hasattr(value, "load_state_dict"):
            raise TypeError(
                f"load_checkpoint: {name}, a {type(value).__name__}, has no load_state_dict: leave it out, since "
                "values are returned"
            )
    group = group_of(process_set, LOAD_CHECKPOINT.name)
    saved = _received(path, list(named), group, process_set)
    own = saved.pop(_OWN, None) or {}
    size, failed = own.get(_SIZE), None
    if group.rank == 0 and size not in (None, group.size):
        log.warning("%s", _words_of_size(path, size, group.size, {name: saved[name] for name in named}))
    try:
        for name, value in named.items():
            failed = name
            value.load_state_dict(saved.pop(name))
        failed = None
    except Exception as caught:  # noqa: BLE001  # whatever the methods of an object raise
        failed = f"{failed}: {caught}"
    failures = allgather_object(failed, name=f"{LOAD_CHECKPOINT.name}: outcome", process_set=process_set)
    for rank, words in enumerate(failures):
        if words is not None:
            raise MismatchError(f"load_checkpoint: {path} does not fit on {group.describe_rank(rank)}: {words}")
    if size == group.size:
        _restore(own["random"][group.rank])
    return {**saved, _SIZE: size}


def _named(kind: str, model: Any, optimizer: Any, scheduler: Any, mine: Mapping[str, Any]) -> dict[str, Any]:
    for name in (_OWN, _SIZE):
        if name in mine:
            raise ValueError(f"{kind}: the name {name!r} is taken for the number of ranks: choose another")
    usual = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {**{name: value for name, value in usual.items() if value is not None}, **mine}


def _has_state(value: Any) -> bool:
    # A class has the method too, and no state.
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def _received(path: str, names: list[str], group: Group, process_set: ProcessSet) -> dict[str, Any]:
    """Returns the content of the file, of which rank 0 sends a copy to the others. Raises its errors on all ranks."""
    sent, error, saved, data = ValueEncoder(), None, None, None
    if group.rank == 0:
        told, encoded = None, None
        try:
            saved = read(path)
            _require_names(saved, names, path)
            encoded = sent.encode([saved, _metadata_of(saved)], path)
        except Exception as caught:  # noqa: BLE001  # sent, so that no rank waits for ever
            error, told, sent = caught, _told(caught), ValueEncoder()
        data = json.dumps([told, encoded, sent.metas]).encode()

    def run(execution: Execution) -> Any:
        told, encoded, metas = json.loads(execution.group.broadcast_signed(data, 0, execution.what))
        tensors = sent.tensors if group.rank == 0 else room_for(metas, [])
        broadcast_tensors(tensors, 0, execution)
        return told, encoded, tensors

    operation = Operation(LOAD_CHECKPOINT, run, same={"root_rank": group.ranks[0], "names": names})
    told, encoded, tensors = submit(operation, process_set, sent.tensors).wait()
    _raise_told(told, error)
    if saved is not None:
        return saved
    decoder = ValueDecoder(tensors, group.describe_rank(0), LOAD_CHECKPOINT.name)
    received, metadata = decoder.decode(encoded)
    for name, each in metadata.items():
        received[name]._metadata = each
    decoded: dict[str, Any] = received
    return decoded


def _require_names(saved: Mapping[str, Any], names: list[str], path: str) -> None:
    if missing := [name for name in names if name not in saved]:
        has = ", ".join(name for name in saved if name != _OWN)
        raise ValueError(f"load_checkpoint: {path} has no {missing[0]!r}; it has {has}")


def _metadata_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the state of a module has besides its entries: the versions of its parts."""
    return {name: dict(value._metadata) for name, value in saved.items() if hasattr(value, "_metadata")}


def _told(error: BaseException | None) -> list[Any] | None:
    """Returns an error as JSON values, for `_raise_told` on other ranks."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return ["OSError", [error.errno, error.strerror, error.filename]]
    kind = type(error) if type(error) in (OSError, TypeError, ValueError) else RuntimeError
    return [kind.__name__, [str(error)]]


def _raise_told(told: list[Any] | None, error: BaseException | None) -> None:
    """Raises what `_told` has described; ``error`` is the cause, on the rank that has it."""
    if told is not None:
        kind, arguments = told
        raise getattr(builtins, kind)(*arguments) from error


def _words_of_size(path: str, size: Any, now: int, states: Mapping[str, Any]) -> str:
    concerned = "; ".join(_concerned(states)) or "what you have chosen by it"
    return (
        f"{path} was saved by {size} rank{'' if size == 1 else 's'}, and there {'is 1' if now == 1 else f'are {now}'}. "
        f"All values are as they were saved: {concerned}. Set anew what depends on the number of ranks: a learning "
        "rate that grows with it, and a schedule's numbers of steps, since an epoch has others (the manual's recipe "
        '"Resume with another number of ranks"). Random states are not restored'
    )


def _concerned(states: Mapping[str, Any]) -> Iterator[str]:
    """Yields the values that may depend on the number of ranks: of each optimizer, and each scheduler."""
    for name, state in states.items():
        if not isinstance(state, dict):
            continue
        groups = state.get("param_groups")
        rates = [f"{float(each['lr']):g}" for each in groups or () if "lr" in each]
        if rates:
            yield f"{name}: lr {', '.join(dict.fromkeys(rates))}"
        found = [f"{key} {state[key]}" for key in _OF_SCHEDULES if key in state] if groups is None else []
        if found:
            yield f"{name}: {', '.join(found)}"


def _random_states() -> dict[str, Any]:
    """Returns the states of this process's generators, as ``torch.load(weights_only=True)`` accepts them.

    Those of PyTorch on the CPU and on the current GPU, of NumPy if the program uses it, and of Python's `random`.
    """
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := _numpy_random()) is not None:
        kind, keys, *rest = numpy.get_state()
        states["numpy"] = [kind, torch.tensor(keys.tolist(), dtype=torch.int64, device="cpu"), *rest]
    return states


def _restore(states: Mapping[str, Any]) -> None:
    """Sets this process's generators to what `_random_states` returned, as far as it has them."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := _numpy_random()) is not None:
        kind, keys, *rest = states["numpy"]
        numpy.set_state((kind, keys.tolist(), *rest))


def _numpy_random() -> Any:
    # Not imported for this: a program without it has no such numbers.
    return sys.modules.get("numpy.random")


# -- the file


def write(path: str, content: Mapping[str, Any]) -> None:
    """Writes the content to the file, or leaves it as it is and raises an OSError, or a TypeError for unsafe values."""
    target = os.path.realpath(path)
    # One name, so that what a killed process has left is overwritten by the next.
    temporary = f"{target}.tmp"
    try:
        with open(temporary, "wb") as file:
            _save(content, file)
            file.flush()
            os.fsync(file.fileno())
        # It reads all but the tensors.
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        os.replace(temporary, target)
        _sync_directory(os.path.dirname(target))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, path) from error
        for name, value in content.items() if isinstance(error, Exception) else ():
            _require_savable(name, value)
        raise


class _Recording:
    """A file for `torch.save`, which reports an error of the disk as one of its own format."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return int(self._file.write(data))
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _save(content: Mapping[str, Any], file: Any) -> None:
    recording = _Recording(file)
    try:
        torch.save(dict(content), recording)  # type: ignore[arg-type]  # all that it uses of a file
    except Exception:
        if recording.error is not None:
            raise recording.error from None
        raise


def _require_savable(name: str, value: Any) -> None:
    """Raises a TypeError for a value that cannot be saved, or that `read` would refuse, as it could run any code."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TypeError(
            f"save_checkpoint: {name} cannot be saved, or not be loaded safely: {_why(error)}: save tensors, numbers, "
            "texts, and lists and dicts of these"
        ) from error


def _sync_directory(directory: str) -> None:
    # Else a power failure could undo the renaming. Some file systems cannot do it.
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: str) -> dict[str, Any]:
    """Returns the content of the file, on the CPU. Raises an OSError, or a ValueError if it is no checkpoint."""
    try:
        with open(path, "rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        if error.errno == errno.EINVAL:
            # torch.load looks for the end of a file that has none.
            raise ValueError(f"{path} is no checkpoint, or was cut off: {error.strerror}") from error
        raise OSError(error.errno, error.strerror, path) from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is no checkpoint that can be loaded safely, as tensors and values alone: {_why(error)}"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no checkpoint, or was cut off: {_why(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} is no checkpoint: it has a {type(content).__name__}, and not a dict of names")
    return content


def _why(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError):
        # PyTorch's first line says how the file could be loaded all the same.
        found = re.search(r"GLOBAL (\S+)", str(error))
        return "it has contents of another kind" if found is None else f"it has {found[1]}, which could run any code"
    return next(iter(str(error).splitlines()), type(error).__name__)


keep_outside_graphs(globals())
