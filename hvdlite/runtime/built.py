"""
Horovod's build queries (`nccl_built()`, ...), answered from torch's build.

Backends that hvdlite never uses, such as MPI, are not enabled even if torch was built with them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .world import current_world


def gloo_built() -> bool:
    """Whether torch was built with gloo, which sends CPU tensors between hosts."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether CPU tensors can be sent between ranks; the same as `gloo_built`."""
    return gloo_built()


def nccl_built() -> int:
    """The version of NCCL that torch was built with, in NCCL's numbering (22809 is 2.28.9); 0 without NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    # A fourth entry may be a suffix.
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]  # torch has no types for it
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def mpi_built() -> bool:
    """Whether torch was built with MPI. hvdlite does not use it."""
    return dist.is_available() and dist.is_mpi_available()


def mpi_enabled() -> bool:
    """False. Even under ``mpirun``, tensors are sent over gloo and NCCL; ``mpirun`` only starts the ranks."""
    return False


def mpi_threads_supported() -> bool:
    """False, because hvdlite does not use MPI. As in Horovod, raises a `NotInitializedError` before `init`."""
    current_world()
    return False


def ddl_built() -> bool:
    """False, because torch has no IBM DDL."""
    return False


def ccl_built() -> bool:
    """False, because hvdlite does not use oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether torch was built with CUDA, even if there is no GPU."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None
