"""
Sets the command line and the environment that the system shows of this process, in ``ps`` and in /proc/PID.

`forked_program` calls it in a process that was forked, which otherwise shows those of the process it is a copy of.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping, Sequence

from hvdlite_wire.processes import stat_of

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# Where proc(5) counts the fields of /proc/PID/stat from 1: the places that stay as they are.
_CODE, _DATA, _HEAP, _STACK = (26, 27), (45, 46), 47, 28

_shown: list[mmap.mmap] = []  # the system reads this memory whenever somebody asks


def show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Shows these from now on, where the kernel is built for that (CONFIG_CHECKPOINT_RESTORE); else does nothing."""
    if not sys.platform.startswith("linux"):
        return
    command = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(command) + len(variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(command + variables)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = begin + len(command), begin + len(command) + len(variables)
    if (stat := stat_of("self")) is None:
        return
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    kept = [stat[place] for place in (*_CODE, *_DATA, _HEAP)]
    heap_end, stack = libc.sbrk(0), stat[_STACK]
    no_auxiliary, no_executable = 0, 0xFFFFFFFF << 32
    map_of_memory = (ctypes.c_uint64 * 13)(
        *kept, heap_end, stack, begin, middle, middle, end, no_auxiliary, no_executable
    )
    size = ctypes.c_ulong(ctypes.sizeof(map_of_memory))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(map_of_memory), size, 0) == 0:
        _shown[:] = [memory]
