"""The columns of the ``--check`` table: what each shows of a host's `host_facts`, and what is wrong with it.

`run_check` calls `diagnose`, which lists the columns, and prints them. Nothing is looked up here. If
hosts differ, the value that most of them have is right, or the first host's value in a tie.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from ..version import VERSION
from .host_facts import SOURCE_TREE, Facts

TORCH_FROM, TORCH_BELOW = (2, 11), (3,)


@dataclass(frozen=True)
class Cell:
    """One column's entry for one host, empty if there is nothing to show. ``wrong`` is a problem and what to do."""

    text: str = ""
    wrong: str = ""


@dataclass(frozen=True)
class Usual:
    """The value that most hosts have, and the first host that has it. ``value`` is None if no host has any."""

    value: str | None
    host: str

    @classmethod
    def of(cls, values: Mapping[str, str | None]) -> Usual:
        """Returns the usual one of ``values``, whose keys are the hosts' labels."""
        known = {host: value for host, value in values.items() if value is not None}
        if not known:
            return cls(None, "")
        value = Counter(known.values()).most_common(1)[0][0]
        return cls(value, next(host for host in known if known[host] == value))

    def differs(self, what: str, value: str | None) -> str:
        """Returns how ``value`` differs from the usual one, as text; empty if it does not."""
        if value is None or value == self.value:
            return ""
        return f"{what} is {value}, but {self.value} on {self.host}"


def diagnose(facts: Mapping[str, Facts], cwd: str) -> dict[str, dict[str, Cell]]:
    """Returns each host's cells by the columns' titles, all by the hosts' labels. ``cwd`` is the job's directory."""

    def usual(value: Callable[[Facts], str | None]) -> Usual:
        return Usual.of({host: value(of_host) for host, of_host in facts.items()})

    judges: dict[str, Callable[[Facts], Cell]] = {
        "Python": partial(_python, usual(lambda of: _begin(of.python, 2))),
        "torch": partial(_torch, usual(lambda of: _begin(of.torch, 2))),
        "CUDA": partial(_cuda, usual(lambda of: _begin(of.cuda, 1))),
        "NCCL": partial(_nccl, usual(lambda of: of.nccl if of.gpus else None)),
        "GPUs": partial(_gpus, usual(lambda of: "GPUs" if of.gpus else "none")),
        "hvdlite": _hvdlite,
        "cores": lambda of: Cell(str(of.cores)),
        "network": _network,
        "directory": lambda of: _directory(of, cwd),
        "cupy": lambda of: Cell(of.cupy or ""),
    }
    if not any(of.cupy for of in facts.values()):  # it is optional
        del judges["cupy"]
    return {host: {title: look(of_host) for title, look in judges.items()} for host, of_host in facts.items()}


def _python(usual: Usual, of: Facts) -> Cell:
    differs = usual.differs("Python", _begin(of.python, 2))
    risk = "one may not read what the other pickles; choose the same with --remote-python PATH"
    return Cell(of.python, _both(differs, risk))


def _torch(usual: Usual, of: Facts) -> Cell:
    if of.torch is None:
        where = f"pip install torch for {of.executable}, or choose a Python that has it with --remote-python PATH"
        return Cell("", f"torch cannot be imported ({of.torch_error}): {where}")
    if not TORCH_FROM <= _numbers(of.torch) < TORCH_BELOW:
        wanted = f"{_dotted(TORCH_FROM)} or later, below {_dotted(TORCH_BELOW)}"
        return Cell(of.torch, f"torch {of.torch} is not supported: install {wanted}")
    if not of.gloo:
        return Cell(of.torch, "this build of torch has no gloo, which CPU tensors need: pip install torch")
    differs = usual.differs("torch", _begin(of.torch, 2))
    return Cell(of.torch, _both(differs, "different versions may be incompatible; install the same version"))


def _cuda(usual: Usual, of: Facts) -> Cell:
    text = (of.cuda or "") + (f" (driver {of.driver})" if of.cuda and of.driver else "")
    differs = usual.differs("CUDA of torch", _begin(of.cuda, 1))
    return Cell(text, _both(differs, "install the same build of torch on all hosts"))


def _nccl(usual: Usual, of: Facts) -> Cell:
    if of.gpus and of.nccl is None:
        return Cell("", "this build of torch has no NCCL, which GPU tensors need: pip install torch")
    differs = usual.differs("NCCL", of.nccl) if of.gpus else ""
    so = "different versions of NCCL cannot communicate; install the same build of torch on all hosts"
    return Cell(of.nccl or "", _both(differs, so))


def _gpus(usual: Usual, of: Facts) -> Cell:
    so = "all hosts must train on GPUs, or none; -x CUDA_VISIBLE_DEVICES= hides GPUs"
    if of.gpus:
        text = ", ".join(f"{count} {name}" for name, count in Counter(of.gpus).items())
        return Cell(text, _both(f"it has GPUs, but {usual.host} has none" if usual.value == "none" else "", so))
    if of.torch is None:
        return Cell()
    if of.devices:
        why = of.cuda_error or "check the driver with nvidia-smi"
        if of.cuda is None:
            why = "it is built without CUDA; install a build with CUDA"
        return Cell("", f"torch cannot use its {'GPU' if of.devices == 1 else f'{of.devices} GPUs'}: {why}")
    return Cell("", _both(f"it has no GPU, but {usual.host} has GPUs" if usual.value == "GPUs" else "", so))


def _hvdlite(of: Facts) -> Cell:
    if of.hvdlite is None:
        return Cell("", f"hvdlite cannot be imported ({of.hvdlite_error}): pip install it for {of.executable}")
    differs = (
        f"hvdlite is {of.hvdlite}, but {VERSION} on this machine" if of.hvdlite not in (VERSION, SOURCE_TREE) else ""
    )
    return Cell(of.hvdlite, _both(differs, "install the same version on all hosts"))


def _network(of: Facts) -> Cell:
    chosen = of.sockets or ""
    missing = [name for name in chosen.split(",") if name and name not in of.interfaces]
    there = f"this host has {', '.join(of.interfaces)}"
    wrong = f"GLOO_SOCKET_IFNAME names {missing[0]}, but {there}: unset it" if missing else ""
    return Cell(chosen, wrong)


def _directory(of: Facts, cwd: str) -> Cell:
    if of.cwd:
        return Cell("exists")
    return Cell("", f"the working directory {cwd} does not exist: a job needs the same path on every host")


def _both(differs: str, so: str) -> str:
    return f"{differs}: {so}" if differs else ""


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _begin(version: str | None, places: int) -> str | None:
    return None if version is None else _dotted(_numbers(version)[:places])
