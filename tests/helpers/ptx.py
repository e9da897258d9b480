"""What CUDA C++ becomes: PTX, by NVRTC, which needs no GPU."""

from __future__ import annotations

import pytest


def ptx_of(source: str) -> str:
    """Returns the PTX of a source, with the options that cupy uses. Skips the test where cupy is not installed."""
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    program = nvrtc.createProgram(source, "kernels.cu", (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=compute_75", "-ftz=true"))
    ptx = nvrtc.getPTX(program)
    nvrtc.destroyProgram(program)
    return ptx.decode() if isinstance(ptx, bytes) else ptx
