"""
How much memory this rank takes: its most since a point, with what it shares counted once among all.

On a GPU PyTorch's allocator tells. On a CPU it is Linux: the most that was resident, less libraries, and less what of
shared memory belongs to the other processes that have it too (as in a proportional set size, as of now).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch

from .errors import UsageError

_CLEAR_REFS, _STATUS, _ROLLUP = (Path("/proc/self", name) for name in ("clear_refs", "status", "smaps_rollup"))
_RESET_PEAK = "5"
_M_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 64 * 2**10


class Usage:
    """That of this process on one device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        if not self._on_gpu:
            _require_linux()
            # Whatever is large goes back to the system as soon as it is freed, so that what is counted is in use.
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)

    def begin(self) -> int:
        """Count the most from now on; the bytes in use now."""
        gc.collect()
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK)
        return (_kilobytes(_STATUS, "RssAnon") + _kilobytes(_ROLLUP, "Pss_Shmem")) * 1024

    def most(self) -> int:
        """The most bytes since `begin`; to be asked while all that was made since is still there."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device)
        # Libraries are left out: how many other programs have them too changes with what else the machine does.
        of_others = _kilobytes(_STATUS, "RssShmem") - _kilobytes(_ROLLUP, "Pss_Shmem")
        return (_kilobytes(_STATUS, "VmHWM") - _kilobytes(_STATUS, "RssFile") - of_others) * 1024


def _require_linux() -> None:
    if not sys.platform.startswith("linux") or "Pss_Shmem:" not in _text_of(_ROLLUP):
        raise UsageError(
            "the memory of a CPU's ranks is measured by Linux's /proc/self/smaps_rollup, which is not here"
        )
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError as error:
        raise UsageError(f"the memory of a CPU's ranks needs {_CLEAR_REFS}: {error.strerror}") from None


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _kilobytes(path: Path, field: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])
