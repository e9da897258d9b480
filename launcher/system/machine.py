"""Counts the cores and GPUs of this machine that a job may use, and identifies machines.

It does not use torch, so that a host without torch can answer, and at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_NVIDIA_GPUS = "/proc/driver/nvidia/gpus"
_NVIDIA_SMI_S = 30.0  # the command first wakes sleeping GPUs


def usable_cores() -> int:
    """Returns the cores that this process may run on, no more than its cgroup's quota of processor time allows."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(groups: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> float | None:
    """Returns how many cores' time the cgroups of this process may use, by version 1 or 2; None without a limit."""
    quotas = []
    for line in _read(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [mount, f"{mount}/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [f"{mount}/{controllers}", f"{mount}/cpu"]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        # A group's parents limit it, too. In a container, only what lies below the mount's own root may be there.
        for top in mounts:
            for length in range(len(parts) + 1):
                quotas.append(_quota_of("/".join([top, *parts[:length]])))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: str) -> float | None:
    words = _read(f"{group}/cpu.max").split() or [
        *_read(f"{group}/cpu.cfs_quota_us").split(),
        *_read(f"{group}/cpu.cfs_period_us").split(),
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:  # "max", or -1
        return None
    return int(words[0]) / int(words[1])


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (OSError, ValueError):
        return ""


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
    valid = next(
        (i for i, name in enumerate(names) if not name or name.startswith("-") or _is_beyond(name, gpus)), None
    )
    return min(gpus, len(names) if valid is None else valid)


def _is_beyond(name: str, gpus: int) -> bool:
    """Whether this is an index, not an identifier, and there is no such GPU."""
    return name.isdecimal() and int(name[:9]) >= gpus


def boot_id() -> str | None:
    """Returns an identifier of this machine's current boot; None if the system has none."""
    return _read("/proc/sys/kernel/random/boot_id").strip() or None


def machine_id() -> str | None:
    """Returns an identifier of this machine and, within a container, of the container; None if unknown."""
    boot = boot_id()
    try:
        spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "mnt", "pid", "user")]
    except OSError:
        return None
    return None if boot is None else " ".join([boot, *spaces])
