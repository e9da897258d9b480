"""
Variables that have no effect here, each with why: Horovod's, and those of hvdlite's prefix that are misspelt.

What the others mean is in `environment`. Pure: what is remarked upon is said there, once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType

_NO_CYCLES = "there are no cycles: a collective starts when it is asked for"
_NO_HIERARCHY = "how ranks of a host and between hosts divide this work is gloo's and NCCL's own to choose"
_NO_SAMPLES = "autotune measures once, before the first step, and there is nothing to say of how"
_NO_CHOICE = "CPU tensors travel through shared memory and, between hosts, over gloo; CUDA tensors over NCCL"
_NO_BUFFER_COPIES = "gradients are computed in the buffer that travels"
_NO_ELASTIC = "there is no elastic training"
_NO_RENDEZVOUS = "ranks meet through hvdlite-run or the launcher that there is"
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "HOROVOD_CYCLE_TIME": _NO_CYCLES,
        "HOROVOD_TIMELINE_MARK_CYCLES": _NO_CYCLES,
        "HOROVOD_CACHE_CAPACITY": "the plan of the buckets is agreed on once, and needs no cache of answers",
        "HOROVOD_HIERARCHICAL_ALLGATHER": _NO_HIERARCHY,
        "HOROVOD_TORUS_ALLREDUCE": _NO_HIERARCHY,
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _NO_SAMPLES,
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _NO_SAMPLES,
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _NO_SAMPLES,
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _NO_SAMPLES,
        "HOROVOD_CONTROLLER": _NO_CHOICE,
        "HOROVOD_CPU_OPERATIONS": _NO_CHOICE,
        "HOROVOD_GLOO_IFACE": "torch's gloo reads GLOO_SOCKET_IFNAME, and hvdlite-run has --network-interface",
        "HOROVOD_NUM_NCCL_STREAMS": "torch gives NCCL a stream of its own",
        "HOROVOD_THREAD_AFFINITY": "threads run where the system lets them: taskset or numactl say where that is",
        "HOROVOD_MPI_THREADS_DISABLE": "no MPI is used",
        "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "no MPI is used",
        "HOROVOD_BATCH_D2D_MEMCOPIES": _NO_BUFFER_COPIES,
        "HOROVOD_DISABLE_GROUP_FUSION": _NO_BUFFER_COPIES,
        "HOROVOD_ENABLE_ASYNC_COMPLETION": "waiting for a CUDA tensor holds up its stream and not the program, always",
        "HOROVOD_DISABLE_NVTX_RANGES": "no NVTX ranges are written",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets may be added and removed at any time",
        "HOROVOD_ELASTIC": _NO_ELASTIC,
        "HOROVOD_ELASTIC_TIMEOUT": _NO_ELASTIC,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": _NO_RENDEZVOUS,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": _NO_RENDEZVOUS,
        "HOROVOD_SPARK_START_TIMEOUT": "there is no Spark in it",
        "HOROVOD_ENABLE_XLA_OPS": "hvdlite is for PyTorch",
        "HOROVOD_CCL_CACHE": "no oneCCL is used",
    }
)
_NOTHING_BUILT = "nothing is built"
# What said how Horovod was to be built, and may still be set where it was.
_OF_BUILDING = re.compile(r"HOROVOD_((WITH|WITHOUT|GPU|BUILD|CUDA|NCCL|ROCM|CCL|ALLOW)(_.*)?|SKIP_COMPILE)")
# Read, but not here: a worker's place, and by hvdlite-run how long hosts and ranks may take.
_OF_LAUNCHERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "START_TIMEOUT")
# What the user may set, under either prefix.
_SHARED = (
    *("FUSION_THRESHOLD", "AUTOTUNE", "AUTOTUNE_LOG", "TIMELINE", "LOG_LEVEL", "LOG_HIDE_TIME"),
    *("STALL_CHECK_DISABLE", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS", "GLOO_TIMEOUT_SECONDS"),
    "HIERARCHICAL_ALLREDUCE",
)
# ... and under hvdlite's alone, with what launcher and library tell each other.
_OWN = (
    *("CHECK", "CHECK_PARAMETERS", "SHM", "STALL_CHECK_TIME_S", "STALL_SHUTDOWN_S", "SECRET", "SECRET_FILE", "VERBOSE"),
    *("HOST", "STORE", "JOB_DIR"),
)
_READ = frozenset(
    [
        *(f"{prefix}_{name}" for prefix in ("HOROVOD", "HVDLITE") for name in (*_SHARED, *_OF_LAUNCHERS)),
        "HOROVOD_HOSTNAME",
        *(f"HVDLITE_{name}" for name in _OWN),
    ]
)
# These say what is so in any case.
_AS_IT_IS = frozenset(
    {
        *(("HOROVOD_CONTROLLER", "gloo"), ("HOROVOD_CPU_OPERATIONS", "gloo"), ("HOROVOD_DYNAMIC_PROCESS_SETS", "1")),
        *(("HOROVOD_ELASTIC", "0"), ("HOROVOD_TIMELINE_MARK_CYCLES", "0")),
        *(("HOROVOD_HIERARCHICAL_ALLGATHER", "0"), ("HOROVOD_TORUS_ALLREDUCE", "0")),
    }
)


def remarks_of_idle(environ: Mapping[str, str]) -> tuple[str, ...]:
    """One line for all that are set to no effect."""
    names_by_reason: dict[str, list[str]] = {}
    for name in sorted(environ):
        text = environ[name].strip()
        ignored = name.startswith(("HOROVOD_", "HVDLITE_")) and name not in _READ
        if ignored and text and (name, text.lower()) not in _AS_IT_IS:
            names_by_reason.setdefault(_why_without_effect(name), []).append(name)
    if not names_by_reason:
        return ()
    said = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items())
    return (f"set, but without effect in hvdlite: {said}",)


def _why_without_effect(name: str) -> str:
    if name in WITHOUT_EFFECT:
        return WITHOUT_EFFECT[name]
    if _OF_BUILDING.fullmatch(name):
        return _NOTHING_BUILT
    prefix, _, rest = name.partition("_")
    known = sorted(each.removeprefix(f"{prefix}_") for each in _READ if each.startswith(f"{prefix}_"))
    # One that is cut short is meant before one that looks alike.
    meant = [each for each in known if rest and each.startswith(f"{rest}_")]
    meant = meant or difflib.get_close_matches(rest, known, n=1, cutoff=0.75)
    return f"not known; did you mean {prefix}_{meant[0]}?" if meant else "not known"
