"""Finds this user's hvdlite-runs in other network namespaces, as of containers: none of them can be asked from here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# The last parts of the paths of programs, and the module, that run `launcher.__main__`.
_PROGRAM, _MODULE = b"hvdlite-run", b"hvdlite_launcher"


def elsewhere() -> list[int]:
    """Returns their process numbers as they are here; those that may be looked at alone."""
    own = network_of("self")
    return [] if own is None else [pid for pid in _launchers() if network_of(pid) not in (None, own)]


def network_of(pid: int | str) -> str | None:
    """Returns the network namespace of a process; None if it has ended, or may not be looked at."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def advice(pids: list[int]) -> str:
    """Returns that they are there, and how to ask them; "" for none."""
    if not pids:
        return ""
    are = "is" if len(pids) == 1 else "are"
    return (
        f"hvdlite-run {', '.join(map(str, pids))} {are} in another network namespace, as of a container: ask in there "
        f"(docker exec, kubectl exec, nsenter --net=/proc/{pids[0]}/ns/net)"
    )


def _launchers() -> Iterator[int]:
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read(4096).split(b"\0")
                if _is_launcher(words):
                    yield int(name)


def _is_launcher(words: list[bytes]) -> bool:
    """Whether a process with these words runs jobs: as a script of its interpreter, or by ``-m``."""
    begin = words[:6]
    return any(os.path.basename(word) == _PROGRAM for word in begin[:2]) or (
        b"-m" in begin[:-1] and begin[begin.index(b"-m") + 1] == _MODULE
    )
