"""
Horovod's build queries (`nccl_built()`, ...), answered from torch's build.

What hvdlite never uses, such as MPI, is not enabled whatever torch was built with.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .world import current_world


def gloo_built() -> bool:
    """Whether torch was built with gloo, over which CPU tensors travel between hosts."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether CPU tensors can travel between ranks: as `gloo_built`."""
    return gloo_built()


def nccl_built() -> int:
    """The version of NCCL that torch was built with, as NCCL numbers it (22809 is 2.28.9); 0 without."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    # Behind these three may come a suffix.
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]  # torch has no types for it
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def mpi_built() -> bool:
    """Whether torch was built with MPI. hvdlite does not use it."""
    return dist.is_available() and dist.is_mpi_available()


def mpi_enabled() -> bool:
    """False: ranks that ``mpirun`` starts find each other through it, and tensors travel over gloo and NCCL."""
    return False


def mpi_threads_supported() -> bool:
    """False, as no MPI is used. As in Horovod, a `NotInitializedError` before `init`."""
    current_world()
    return False


def ddl_built() -> bool:
    """False: torch has no IBM DDL."""
    return False


def ccl_built() -> bool:
    """False: of torch's engines hvdlite uses gloo and NCCL, and not oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether torch was built with CUDA; whether there is a GPU is another question."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None
