"""`Facts` about a host (Python, torch, GPUs, network), and the program that collects them there.

`run_check` sends this file's text to a host as a program (``python -c``), since it must run where the workers' Python
has no hvdlite. So it imports nothing of this package, and reports all problems as `Facts`. Its second argument is the
text of `system.machine`, which counts cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import sys
import warnings
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

SOURCE_TREE = "source tree"  # not installed, so the version is unknown


@dataclass(frozen=True)
class Facts:
    """Facts about one host, as a worker sees them. None means missing; then ``*_error`` is the reason.

    ``gpus`` are those that torch can use, ``devices`` the number of GPUs in the machine. ``cuda`` and ``nccl`` are the
    versions that torch was built with. ``sockets`` is the value of GLOO_SOCKET_IFNAME for the workers, ``interfaces``
    are the network interfaces of the host. ``cwd``: whether the job's working directory exists.
    """

    python: str
    executable: str
    cores: int
    cwd: bool
    sockets: str | None = None
    interfaces: tuple[str, ...] = ()
    devices: int = 0
    torch: str | None = None
    torch_error: str | None = None
    gloo: bool = False
    cuda: str | None = None
    cuda_error: str | None = None
    nccl: str | None = None
    gpus: tuple[str, ...] = ()
    hvdlite: str | None = None
    hvdlite_error: str | None = None


def main(cwd: str, machine: str) -> None:
    """Prints the facts as one line, for `hvdlite_wire.codec`.

    ``cwd`` is the job's working directory, ``machine`` a module's text.
    """
    counts: dict[str, Any] = {}
    exec(machine, counts)  # the launcher's own text, as this one is
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": counts["usable_cores"](),
        "cwd": os.path.isdir(cwd),
        "sockets": os.environ.get("GLOO_SOCKET_IFNAME"),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "devices": _devices(),
    }
    with contextlib.redirect_stdout(sys.stderr):  # an import may print
        facts |= _of_imports()
    print(json.dumps(list(vars(Facts(**facts)).values())), flush=True)


def _of_imports() -> dict[str, Any]:
    """Returns the facts about torch and hvdlite, or the reasons why they cannot be imported."""
    try:
        facts = _of_torch(import_module("torch"))
    except BaseException as error:  # noqa: BLE001  # a module may raise anything, even SystemExit
        # hvdlite cannot be imported without torch, which is not an error of hvdlite's.
        if find_spec("hvdlite") is not None:
            return {"torch_error": _first_line(error), "hvdlite": _version_of_hvdlite()}
        return {"torch_error": _first_line(error), "hvdlite_error": "ModuleNotFoundError: No module named 'hvdlite'"}
    try:
        import_module("hvdlite")
    except BaseException as error:  # noqa: BLE001  # as above
        return {**facts, "hvdlite_error": _first_line(error)}
    return {**facts, "hvdlite": _version_of_hvdlite()}


def _of_torch(torch: Any) -> dict[str, Any]:
    distributed = torch.distributed
    facts: dict[str, Any] = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    facts["gloo"] = bool(distributed.is_available() and distributed.is_gloo_available())
    if distributed.is_available() and distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            facts["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        elif warned:
            facts["cuda_error"] = _first_line(warned[0].message)
    return facts


def _devices() -> int:
    """Returns the number of the GPUs' device files; 0 if CUDA_VISIBLE_DEVICES hides all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    hidden = not visible or visible.startswith("-")
    return 0 if hidden else sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))


def _version_of_hvdlite() -> str:
    try:
        return metadata.version("hvdlite")
    except metadata.PackageNotFoundError:
        return SOURCE_TREE


def _first_line(error: object) -> str:
    kind = f"{type(error).__name__}: " if not isinstance(error, Warning) else ""
    return f"{kind}{error}".partition("\n")[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
