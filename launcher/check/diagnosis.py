"""The columns of the ``--check`` table: what each shows of a host's `host_facts`, and what is wrong with it.

Pure functions; `diagnose` lists the columns, and `check_table` formats them.

Of hosts that differ, most are right, or the first of them if there are as many of each: the odd one out is wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..version import VERSION
from .host_facts import SOURCE_TREE, Facts

TORCH_FROM, TORCH_BELOW = (2, 11), (3,)


@dataclass(frozen=True)
class Cell:
    """One thing about one host; without text there is none. ``wrong`` is why that will not do, and what to do."""

    text: str = ""
    wrong: str = ""


@dataclass(frozen=True)
class Usual:
    """What most hosts have, and the first of those that have it; ``value`` None if none has any."""

    value: str | None
    host: str

    @classmethod
    def of(cls, values: Mapping[str, str | None]) -> Usual:
        """Of what each host has, by its label."""
        known = {host: value for host, value in values.items() if value is not None}
        if not known:
            return cls(None, "")
        value = Counter(known.values()).most_common(1)[0][0]
        return cls(value, next(host for host in known if known[host] == value))

    def differs(self, what: str, value: str | None) -> str:
        """In words, if it does."""
        if value is None or value == self.value:
            return ""
        return f"{what} is {value} here and {self.value} on {self.host}"


Judge = Callable[[Facts], Cell]


def diagnose(facts: Mapping[str, Facts], cwd: str) -> dict[str, dict[str, Cell]]:
    """By the hosts' labels, each with the same titles. ``cwd`` is where the job would run."""

    def usual(value: Callable[[Facts], str | None]) -> Usual:
        return Usual.of({host: value(of_host) for host, of_host in facts.items()})

    judges: dict[str, Judge] = {
        "Python": _python(usual(lambda of: _minor(of.python))),
        "torch": _torch(usual(lambda of: _minor(of.torch))),
        "CUDA": _cuda(usual(lambda of: _major(of.cuda))),
        "NCCL": _nccl(usual(lambda of: of.nccl if of.gpus else None)),
        "GPUs": _gpus(Usual.of({host: "GPUs" if of.gpus else "none" for host, of in facts.items()})),
        "hvdlite": _hvdlite,
        "cores": lambda of: Cell(str(of.cores)),
        "network": _network,
        "directory": lambda of: _directory(of, cwd),
        "cupy": lambda of: Cell(of.cupy or ""),
    }
    if not any(of.cupy for of in facts.values()):  # nobody needs it
        del judges["cupy"]
    return {host: {title: look(of_host) for title, look in judges.items()} for host, of_host in facts.items()}


def _python(usual: Usual) -> Judge:
    def look(of: Facts) -> Cell:
        differs = usual.differs("Python", _minor(of.python))
        risk = "what one pickles another may not be able to read; use the same, --remote-python PATH says which"
        return Cell(of.python, _both(differs, risk))

    return look


def _torch(usual: Usual) -> Judge:
    def look(of: Facts) -> Cell:
        if of.torch is None:
            where = f"pip install torch for {of.executable}, or --remote-python PATH names the Python that has it"
            return Cell("", f"torch cannot be imported ({of.torch_error}): {where}")
        if not TORCH_FROM <= _numbers(of.torch) < TORCH_BELOW:
            wanted = f"{_dotted(TORCH_FROM)} or later, below {_dotted(TORCH_BELOW)}"
            return Cell(of.torch, f"torch {of.torch} is not supported: install {wanted}")
        if not of.gloo:
            return Cell(of.torch, "this build of torch has no gloo, which CPU tensors need: install one from pip")
        differs = usual.differs("torch", _minor(of.torch))
        return Cell(of.torch, _both(differs, "they may not understand each other; install the same version"))

    return look


def _cuda(usual: Usual) -> Judge:
    def look(of: Facts) -> Cell:
        text = (of.cuda or "") + (f" (driver {of.driver})" if of.cuda and of.driver else "")
        differs = usual.differs("CUDA of torch", _major(of.cuda))
        return Cell(text, _both(differs, "install the same build of torch on both"))

    return look


def _nccl(usual: Usual) -> Judge:
    def look(of: Facts) -> Cell:
        if of.gpus and of.nccl is None:
            return Cell("", "this build of torch has no NCCL, which GPU tensors need: install one from pip")
        differs = usual.differs("NCCL", of.nccl) if of.gpus else ""
        so = "it talks to its own version alone; install the same build of torch"
        return Cell(of.nccl or "", _both(differs, so))

    return look


def _gpus(usual: Usual) -> Judge:
    def look(of: Facts) -> Cell:
        so = "gradients are on GPUs on all hosts or on none; -x CUDA_VISIBLE_DEVICES= hides them"
        if of.gpus:
            text = ", ".join(f"{count} {name}" for name, count in Counter(of.gpus).items())
            return Cell(text, _both(f"GPUs here, and none on {usual.host}" if usual.value == "none" else "", so))
        if of.torch is None:
            return Cell()
        if of.devices:
            why = of.cuda_error or "does its driver work? nvidia-smi says"
            if of.cuda is None:
                why = "it is built without CUDA; install a build with it"
            return Cell("", f"there {_are(of.devices)} that torch cannot use: {why}")
        return Cell("", _both(f"no GPU here, though there is on {usual.host}" if usual.value == "GPUs" else "", so))

    return look


def _hvdlite(of: Facts) -> Cell:
    if of.hvdlite is None:
        return Cell("", f"hvdlite cannot be imported ({of.hvdlite_error}): pip install it for {of.executable}")
    differs = f"hvdlite is {of.hvdlite} there and {VERSION} here" if of.hvdlite not in (VERSION, SOURCE_TREE) else ""
    return Cell(of.hvdlite, _both(differs, "install the same version everywhere"))


def _network(of: Facts) -> Cell:
    chosen = of.sockets or ""
    missing = [name for name in chosen.split(",") if name and name not in of.interfaces]
    there = f"there are {', '.join(of.interfaces)}"
    wrong = f"GLOO_SOCKET_IFNAME names {missing[0]}, which is not there; {there}; unset it" if missing else ""
    return Cell(chosen, wrong)


def _directory(of: Facts, cwd: str) -> Cell:
    if of.cwd:
        return Cell("there")
    return Cell("", f"the working directory {cwd} does not exist: a job needs the same path on every host")


def _both(differs: str, so: str) -> str:
    return f"{differs}: {so}" if differs else ""


def _are(count: int) -> str:
    return "is a GPU" if count == 1 else f"are {count} GPUs"


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _minor(version: str | None) -> str | None:
    return None if version is None else _dotted(_numbers(version)[:2])


def _major(version: str | None) -> str | None:
    return None if version is None else _dotted(_numbers(version)[:1])
