"""
Finds HOROVOD_ and HVDLITE_ variables that are set without effect, and gives the reason or the likely intended name.

Horovod's are recognised with the prefix HVDLITE_ too. The variables that have an effect are in `environment`, which
calls `remarks_of_ignored` for the warning about all others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_OURS, _HOROVODS = "HVDLITE_", "HOROVOD_"


@dataclass(frozen=True, slots=True)
class Ignored:
    """A variable of Horovod's that has no effect here, and ``why``.

    ``name`` is without HOROVOD_. ``harmless`` is the value that asks for what hvdlite does anyway: a variable with
    this value is not reported.
    """

    name: str
    why: str
    harmless: str | None = None


_NO_CYCLES = "hvdlite has no cycles: a collective starts when the ranks call it"
_NO_HIERARCHY = "gloo and NCCL choose the algorithm of this collective themselves"
_NO_SAMPLES = "autotune measures once, before the first step, and has no settings"
_NO_CHOICE = "CPU tensors are sent through shared memory and, between hosts, by gloo; CUDA tensors by NCCL"
_NO_BUFFER_COPIES = "gradients are computed in the buffer that is sent"
_NO_RENDEZVOUS = "ranks connect through hvdlite-run, or whatever launcher started them"
_NO_MPI = "hvdlite does not use MPI"
IGNORED = (
    Ignored("CYCLE_TIME", _NO_CYCLES),
    Ignored("TIMELINE_MARK_CYCLES", _NO_CYCLES, harmless="0"),
    Ignored("CACHE_CAPACITY", "ranks agree on the buckets once, and need no cache"),
    Ignored("HIERARCHICAL_ALLGATHER", _NO_HIERARCHY, harmless="0"),
    Ignored("TORUS_ALLREDUCE", _NO_HIERARCHY, harmless="0"),
    Ignored("AUTOTUNE_WARMUP_SAMPLES", _NO_SAMPLES),
    Ignored("AUTOTUNE_STEPS_PER_SAMPLE", _NO_SAMPLES),
    Ignored("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", _NO_SAMPLES),
    Ignored("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", _NO_SAMPLES),
    Ignored("CONTROLLER", _NO_CHOICE, harmless="gloo"),
    Ignored("CPU_OPERATIONS", _NO_CHOICE, harmless="gloo"),
    Ignored("GLOO_IFACE", "torch's gloo reads GLOO_SOCKET_IFNAME, and hvdlite-run has --network-interface"),
    Ignored("NUM_NCCL_STREAMS", "PyTorch gives NCCL a stream of its own"),
    Ignored("THREAD_AFFINITY", "the system places the threads: use taskset or numactl"),
    Ignored("MPI_THREADS_DISABLE", _NO_MPI),
    Ignored("ADASUM_MPI_CHUNK_SIZE", _NO_MPI),
    Ignored("BATCH_D2D_MEMCOPIES", _NO_BUFFER_COPIES),
    Ignored("DISABLE_GROUP_FUSION", _NO_BUFFER_COPIES),
    Ignored("ENABLE_ASYNC_COMPLETION", "waiting for a CUDA tensor always blocks its stream and not the program"),
    Ignored("DISABLE_NVTX_RANGES", "hvdlite writes no NVTX ranges"),
    Ignored("DYNAMIC_PROCESS_SETS", "process sets may be added and removed at any time", harmless="1"),
    Ignored("GLOO_RENDEZVOUS_ADDR", _NO_RENDEZVOUS),
    Ignored("GLOO_RENDEZVOUS_PORT", _NO_RENDEZVOUS),
    Ignored("SPARK_START_TIMEOUT", "hvdlite does not use Spark"),
    Ignored("ENABLE_XLA_OPS", "hvdlite is for PyTorch"),
    Ignored("CCL_CACHE", "hvdlite does not use oneCCL"),
)
_IGNORED = {f"{_HOROVODS}{each.name}": each for each in IGNORED}

# Variables that configure the build of Horovod. They may still be set where it was built.
_OF_BUILDING = re.compile(r"HOROVOD_((WITH|WITHOUT|GPU|BUILD|CUDA|NCCL|ROCM|CCL|ALLOW)(_.*)?|SKIP_COMPILE)")


def remarks_of_ignored(environ: Mapping[str, str], known: Collection[str]) -> tuple[str, ...]:
    """Returns one line about all HVDLITE_ and HOROVOD_ variables that are set and not ``known``; () without any."""
    names_by_reason: dict[str, list[str]] = {}
    for name in sorted(environ):
        text = environ[name].strip()
        if text and name.startswith((_OURS, _HOROVODS)) and name not in known:
            # A variable of Horovod's is also looked up when it is written with hvdlite's prefix.
            ignored = _IGNORED.get(name) or _IGNORED.get(name.replace(_OURS, _HOROVODS, 1))
            if ignored is None:
                names_by_reason.setdefault(_why_unknown(name, known), []).append(name)
            elif text.lower() != ignored.harmless:
                names_by_reason.setdefault(ignored.why, []).append(name)
    if not names_by_reason:
        return ()
    said = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items())
    return (f"these variables are set and have no effect in hvdlite: {said}",)


def _why_unknown(name: str, known: Collection[str]) -> str:
    if _OF_BUILDING.fullmatch(name):
        return "hvdlite has nothing to build"
    meant = _meant_by(name, known)
    return "unknown" if meant is None else f"unknown; did you mean {meant}?"


def _meant_by(name: str, known: Collection[str]) -> str | None:
    """Guesses the variable that the user meant by a misspelt one; None without a guess.

    For HOROVOD_CHECK_PARAMETERS it is HVDLITE_CHECK_PARAMETERS, because Horovod has no such variable.
    """
    prefixes = (_OURS,) if name.startswith(_OURS) else (_HOROVODS, _OURS)
    rest = name.removeprefix(prefixes[0])
    whole: dict[str, str] = {}
    for prefix in prefixes:
        for each in sorted(each for each in known if each.startswith(prefix)):
            whole.setdefault(each.removeprefix(prefix), each)
    # In the order of likelihood: the same name with the other prefix, a name that was cut short, a similar name.
    alike = [each for each in whole if each == rest]
    alike += [each for each in whole if rest and each.startswith(f"{rest}_")]
    alike += difflib.get_close_matches(rest, whole, n=1, cutoff=0.75)
    return whole[alike[0]] if alike else None
