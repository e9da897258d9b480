"""
Writes and reads the file of a checkpoint: `write` replaces it as a whole, `read` loads nothing but tensors and values.

    content ── torch.save ── FILE.tmp ── fsync ── loaded once ── renamed to FILE

A process that is killed meanwhile, or a disk that is full, leaves the file as it was. `checkpoint` calls both, on one
rank alone. Both load with ``weights_only=True``: a file from a stranger runs no code.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch


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
        _require_loadable(temporary, content)
        os.replace(temporary, target)
        _sync_directory(os.path.dirname(target))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, path) from error
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
        for name, value in content.items():
            _require_savable(name, value)
        raise


def _require_savable(name: str, value: Any) -> None:
    try:
        torch.save(value, io.BytesIO())
    except Exception as error:
        raise TypeError(
            f"save_checkpoint: {name} cannot be saved: {_first_line(error)}: save tensors, numbers, texts, and lists "
            "and dicts of these"
        ) from error


def _require_loadable(path: str, content: Mapping[str, Any]) -> None:
    """Raises a TypeError that names what `read` would refuse. It reads all but the tensors."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        for name, value in content.items():
            if not _is_loadable(value):
                raise TypeError(
                    f"save_checkpoint: {name} has objects of a class that a checkpoint does not load, as that could "
                    "run any code: save tensors, numbers, texts, and lists and dicts of these"
                ) from error
        raise


def _is_loadable(value: Any) -> bool:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


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
            f"{path} is no checkpoint that can be loaded safely, as tensors and values alone: {_first_line(error)}"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no checkpoint, or was cut off: {_first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} is no checkpoint: it has a {type(content).__name__}, and not a dict of names")
    return content


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
