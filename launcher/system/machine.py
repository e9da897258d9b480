"""Counts the cores and GPUs of this machine that a job may use, and identifies machines.

It does not use torch, so that a host without torch can answer, and at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_NVIDIA_GPUS = "/proc/driver/nvidia/gpus"
_NVIDIA_SMI_S = 30.0  # the command first wakes sleeping GPUs


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def slots_by_hardware(environ: Mapping[str, str] = os.environ, nvidia_gpus: str = _NVIDIA_GPUS) -> int:
    """Returns the number of slots for ``auto``: the GPUs that a worker would see, else the usable cores."""
    return _visible(_count_gpus(environ, nvidia_gpus), environ.get("CUDA_VISIBLE_DEVICES")) or usable_cores()


def _count_gpus(environ: Mapping[str, str], nvidia_gpus: str) -> int:
    try:
        return len(os.listdir(nvidia_gpus))
    except OSError:  # no driver, or one without this directory, as under WSL
        pass
    import subprocess  # noqa: PLC0415  # costs 10 ms, seldom needed

    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_NVIDIA_SMI_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith(b"GPU ") for line in listed.stdout.splitlines())


def _visible(gpus: int, devices: str | None) -> int:
    """Returns how many GPUs CUDA_VISIBLE_DEVICES leaves. CUDA reads it up to the first invalid entry."""
    if devices is None:
        return gpus
    names = [name.strip() for name in devices.split(",")]
    valid = next((i for i, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return min(gpus, valid)


def boot_id() -> str | None:
    """Returns an identifier of this machine's current boot; None if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return None


def machine_id() -> str | None:
    """Returns an identifier of this machine and, within a container, of the container; None if unknown."""
    boot = boot_id()
    try:
        spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "mnt", "pid", "user")]
    except OSError:
        return None
    return None if boot is None else " ".join([boot, *spaces])
