"""`Facts` about a host (Python, torch, GPUs, network), and the program that collects them there.

This file is sent to a host as the text of a program (``python -c``), since it is to run where hvdlite is not
installed for the workers: it imports nothing of ours, and what it finds wrong is one of its `Facts`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, get_type_hints

_DRIVER = "/proc/driver/nvidia/version"
SOURCE_TREE = "source tree"  # not installed, so that nothing says which version it is
_NO_HVDLITE = "ModuleNotFoundError: No module named 'hvdlite'"


@dataclass(frozen=True)
class Facts:
    """Of one host, as a worker there sees it. What is not there is None, and ``*_error`` says why it is not.

    ``gpus`` are those that torch can use, ``devices`` the number of those in the machine. ``cuda`` and ``nccl`` are the
    versions that torch was built with. ``sockets`` is the network interface that the workers shall use, as in
    GLOO_SOCKET_IFNAME, ``interfaces`` what there is. ``cwd``: whether the job's working directory exists.
    """

    python: str
    executable: str
    cores: int
    cwd: bool
    sockets: str | None = None
    interfaces: tuple[str, ...] = ()
    devices: int = 0
    driver: str | None = None
    cupy: str | None = None
    torch: str | None = None
    torch_error: str | None = None
    gloo: bool = False
    cuda: str | None = None
    cuda_error: str | None = None
    nccl: str | None = None
    gpus: tuple[str, ...] = ()
    hvdlite: str | None = None
    hvdlite_error: str | None = None


def facts_from(line: str) -> Facts | None:
    """What `main` printed; None if that is something else."""
    try:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(line).items()
        }
        facts = Facts(**values)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    hints = get_type_hints(Facts)
    right = all(_is_a(hints[field.name], getattr(facts, field.name)) for field in fields(Facts))
    return facts if right else None


def _is_a(hint: Any, value: object) -> bool:
    if hint == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    return isinstance(value, hint)


def main(cwd: str) -> None:
    """Print the facts as one line of JSON. ``cwd`` is the job's working directory."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "cwd": os.path.isdir(cwd),
        "sockets": os.environ.get("GLOO_SOCKET_IFNAME"),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "devices": _devices(),
        "driver": _driver(),
        "cupy": next(filter(None, map(_installed, ("cupy", "cupy-cuda12x", "cupy-cuda13x"))), None),
    }
    # In a process of its own: what a broken installation does to it, it does not do to us.
    facts |= _in_child(_imports)
    print(json.dumps(facts), flush=True)


def _imports() -> Iterator[dict[str, Any]]:
    """What torch is, then what hvdlite is; or why it cannot be imported."""
    try:
        yield _of_torch(import_module("torch"))
    except BaseException as error:  # noqa: BLE001  # a module may raise anything, even SystemExit
        yield {"torch_error": _first_line(error)}
        # Which cannot be imported without it either, and that is not its fault.
        there = find_spec("hvdlite") is not None
        yield {"hvdlite": _version_of_hvdlite()} if there else {"hvdlite_error": _NO_HVDLITE}
        return
    try:
        import_module("hvdlite")
        yield {"hvdlite": _version_of_hvdlite()}
    except BaseException as error:  # noqa: BLE001  # as above
        yield {"hvdlite_error": _first_line(error)}


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


def _in_child(ask: Callable[[], Iterator[dict[str, Any]]]) -> dict[str, Any]:
    """All that it answers, and of what it died if it did not come to its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # whatever an import prints, stdout is for the facts
        try:
            with open(writer, "w") as pipe:
                for answer in ask():
                    print(json.dumps(answer), file=pipe, flush=True)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answers = [json.loads(line) for line in pipe]
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    how = f"the import was killed by signal {-code}" if code < 0 else f"the import ended with exit code {code}"
    of_which = ("torch_error", "hvdlite_error")
    answers += [{name: how} for name in of_which[len(answers) :]]
    return {name: value for answer in answers for name, value in answer.items()}


def _devices() -> int:
    """As many GPUs as there are device files, but for those that CUDA_VISIBLE_DEVICES hides all of."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    hidden = not visible or visible.startswith("-")
    return 0 if hidden else sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))


def _driver() -> str | None:
    try:
        with open(_DRIVER) as file:
            found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.readline())
    except OSError:
        return None
    return found and found[0]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version_of_hvdlite() -> str:
    return _installed("hvdlite") or SOURCE_TREE


def _first_line(error: object) -> str:
    kind = f"{type(error).__name__}: " if not isinstance(error, Warning) else ""
    return f"{kind}{error}".partition("\n")[0]


if __name__ == "__main__":
    main(sys.argv[1])
