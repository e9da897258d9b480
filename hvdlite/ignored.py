"""
Finds variables that are set without effect: Horovod's that mean nothing here, each with the reason, and unknown names.

Horovod's are known with hvdlite's prefix as well.

The variables that have an effect are in `environment`, which asks here for the one line about all others.
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

    ``name`` stands after HOROVOD_. ``harmless`` is the value that asks for what is so anyway: no warning names it.
    """

    name: str
    why: str
    harmless: str | None = None


_NO_CYCLES = "there are no cycles: a collective starts when it is asked for"
_NO_HIERARCHY = "how ranks of a host and between hosts divide this work is gloo's and NCCL's own to choose"
_NO_SAMPLES = "autotune measures once, before the first step, and there is nothing to say of how"
_NO_CHOICE = "CPU tensors travel through shared memory and, between hosts, over gloo; CUDA tensors over NCCL"
_NO_BUFFER_COPIES = "gradients are computed in the buffer that travels"
_NO_ELASTIC = "there is no elastic training"
_NO_RENDEZVOUS = "ranks meet through hvdlite-run or the launcher that there is"
_NO_MPI = "no MPI is used"
IGNORED = (
    Ignored("CYCLE_TIME", _NO_CYCLES),
    Ignored("TIMELINE_MARK_CYCLES", _NO_CYCLES, harmless="0"),
    Ignored("CACHE_CAPACITY", "the plan of the buckets is agreed on once, and needs no cache of answers"),
    Ignored("HIERARCHICAL_ALLGATHER", _NO_HIERARCHY, harmless="0"),
    Ignored("TORUS_ALLREDUCE", _NO_HIERARCHY, harmless="0"),
    Ignored("AUTOTUNE_WARMUP_SAMPLES", _NO_SAMPLES),
    Ignored("AUTOTUNE_STEPS_PER_SAMPLE", _NO_SAMPLES),
    Ignored("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", _NO_SAMPLES),
    Ignored("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", _NO_SAMPLES),
    Ignored("CONTROLLER", _NO_CHOICE, harmless="gloo"),
    Ignored("CPU_OPERATIONS", _NO_CHOICE, harmless="gloo"),
    Ignored("GLOO_IFACE", "torch's gloo reads GLOO_SOCKET_IFNAME, and hvdlite-run has --network-interface"),
    Ignored("NUM_NCCL_STREAMS", "torch gives NCCL a stream of its own"),
    Ignored("THREAD_AFFINITY", "threads run where the system lets them: taskset or numactl say where that is"),
    Ignored("MPI_THREADS_DISABLE", _NO_MPI),
    Ignored("ADASUM_MPI_CHUNK_SIZE", _NO_MPI),
    Ignored("BATCH_D2D_MEMCOPIES", _NO_BUFFER_COPIES),
    Ignored("DISABLE_GROUP_FUSION", _NO_BUFFER_COPIES),
    Ignored("ENABLE_ASYNC_COMPLETION", "waiting for a CUDA tensor holds up its stream and not the program, always"),
    Ignored("DISABLE_NVTX_RANGES", "no NVTX ranges are written"),
    Ignored("DYNAMIC_PROCESS_SETS", "process sets may be added and removed at any time", harmless="1"),
    Ignored("ELASTIC", _NO_ELASTIC, harmless="0"),
    Ignored("ELASTIC_TIMEOUT", _NO_ELASTIC),
    Ignored("GLOO_RENDEZVOUS_ADDR", _NO_RENDEZVOUS),
    Ignored("GLOO_RENDEZVOUS_PORT", _NO_RENDEZVOUS),
    Ignored("SPARK_START_TIMEOUT", "there is no Spark in it"),
    Ignored("ENABLE_XLA_OPS", "hvdlite is for PyTorch"),
    Ignored("CCL_CACHE", "no oneCCL is used"),
)
_IGNORED = {f"{_HOROVODS}{each.name}": each for each in IGNORED}

# What said how Horovod was to be built, and may still be set where it was.
_OF_BUILDING = re.compile(r"HOROVOD_((WITH|WITHOUT|GPU|BUILD|CUDA|NCCL|ROCM|CCL|ALLOW)(_.*)?|SKIP_COMPILE)")


def remarks_of_ignored(environ: Mapping[str, str], known: Collection[str]) -> tuple[str, ...]:
    """One line about all variables with either prefix that are not among the ``known`` ones; none where all are."""
    names_by_reason: dict[str, list[str]] = {}
    for name in sorted(environ):
        text = environ[name].strip()
        if text and name.startswith((_OURS, _HOROVODS)) and name not in known:
            # With hvdlite's prefix too: who spells a variable of Horovod's so is told why there is none.
            ignored = _IGNORED.get(name) or _IGNORED.get(name.replace(_OURS, _HOROVODS, 1))
            if ignored is None:
                names_by_reason.setdefault(_why_unknown(name, known), []).append(name)
            elif text.lower() != ignored.harmless:
                names_by_reason.setdefault(ignored.why, []).append(name)
    if not names_by_reason:
        return ()
    said = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items())
    return (f"set, but without effect in hvdlite: {said}",)


def _why_unknown(name: str, known: Collection[str]) -> str:
    if _OF_BUILDING.fullmatch(name):
        return "nothing is built"
    meant = _meant_by(name, known)
    return "not known" if meant is None else f"not known; did you mean {meant}?"


def _meant_by(name: str, known: Collection[str]) -> str | None:
    """The variable that a misspelt one most likely stands for, or None.

    For HOROVOD_CHECK_PARAMETERS it is HVDLITE_CHECK_PARAMETERS: hvdlite alone has that one.
    """
    prefixes = (_OURS,) if name.startswith(_OURS) else (_HOROVODS, _OURS)
    rest = name.removeprefix(prefixes[0])
    whole: dict[str, str] = {}
    for prefix in prefixes:
        for each in sorted(each for each in known if each.startswith(prefix)):
            whole.setdefault(each.removeprefix(prefix), each)
    # The same with hvdlite's prefix is meant before one that is cut short, and that before one that looks alike.
    alike = [each for each in whole if each == rest]
    alike += [each for each in whole if rest and each.startswith(f"{rest}_")]
    alike += difflib.get_close_matches(rest, whole, n=1, cutoff=0.75)
    return whole[alike[0]] if alike else None
