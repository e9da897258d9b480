"""Runs CUDA C++ on a CPU: compiled by g++ with `cuda_on_cpu.h`, its threads one after the other."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

# asm("mul.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
_OPERAND = r'"\w"\(((?:[^()]|\([^()]*\))+)\)'
_ASM = re.compile(rf'asm\("([\w.]+) [%\d, ]+;" : "=\w"\(([^()]+)\) : ({_OPERAND}(?:, {_OPERAND})*)\);')
_KERNEL = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\) \{')

_THREADS = 256


class CpuProgram:
    """A `Program` for a CPU. Grids are small, so that each thread has several turns."""

    def __init__(self, source: str) -> None:
        self._library = _compiled(source)

    def launch(self, kernel: str, threads: int, *arguments: float) -> None:
        blocks = min(-(-threads // _THREADS), 3)
        # As cupy passes them.
        types = {int: ctypes.c_longlong, float: ctypes.c_double}
        run = getattr(self._library, f"run_{kernel}")
        waiting = run(blocks, *(types[type(argument)](argument) for argument in arguments))
        assert not waiting, f"{waiting} threads of a warp wait in a shuffle for others, which have ended"


def translated(source: str) -> str:
    """Returns C++ for a CPU: PTX as calls of functions, and a function ``run_NAME(blocks, ...)`` for each kernel."""
    header = Path(__file__).with_suffix(".h").read_text()

    def call(found: re.Match[str]) -> str:
        name, out, operands = found.group(1, 2, 3)
        return f"{out} = ptx::{name.replace('.', '_')}({', '.join(re.findall(_OPERAND, operands))});"

    code = _ASM.sub(call, source)
    assert "asm" not in code, "an instruction is written in another way than _ASM expects"
    runs = []
    for name, parameters in _KERNEL.findall(code):
        names = ", ".join(parameter.split()[-1].lstrip("*") for parameter in parameters.split(","))
        runs.append(
            f'extern "C" int run_{name}(unsigned int blocks, {parameters}) '
            f"{{ return run_grid(blocks, {_THREADS}, [&] {{ {name}({names}); }}); }}\n"
        )
    assert len(runs) == code.count("__global__")
    return "\n".join([header, code, *runs])


@functools.cache
def _compiled(source: str) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine")
    with tempfile.TemporaryDirectory() as directory:
        code, library = Path(directory, "kernels.cpp"), Path(directory, "kernels.so")
        code.write_text(translated(source))
        # A misplaced address is an error on a GPU, and here.
        flags = ["-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-U_FORTIFY_SOURCE"]
        flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
        subprocess.run(["g++", "-std=c++17", *flags, "-shared", "-fPIC", "-o", library, code], check=True, timeout=300)
        return ctypes.CDLL(str(library))
