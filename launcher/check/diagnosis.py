"""The tables of ``--check``: what each column shows of a host's `host_facts`, what is wrong with it, and what to do.

`run_check` calls `diagnose`, which lists the columns, and `show`. Nothing is looked up here. If hosts differ, the value
that most of them have is right, or the first host's value in a tie.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    }
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
    differs = usual.differs("CUDA of torch", _begin(of.cuda, 1))
    return Cell(of.cuda or "", _both(differs, "install the same build of torch on all hosts"))


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


# -- the tables: hosts, round trips between them, and what to do

_GOOD, _BAD, _NONE = "✓", "✗", "–"


@dataclass(frozen=True)
class RoundTrips:
    """The round trips between hosts, by pairs in the hosts' order: the microseconds, or why there are none.

    ``blocked`` has the reason why the first of two hosts cannot open a TCP connection to the second.
    """

    hosts: Sequence[str]
    times_us: dict[tuple[str, str], float] = field(default_factory=dict)
    troubles: dict[tuple[str, str], str] = field(default_factory=dict)
    blocked: dict[tuple[str, str], str] = field(default_factory=dict)


def show(rows: Mapping[str, Mapping[str, Cell] | str], trips: RoundTrips | None) -> tuple[str, bool]:
    """Returns the text, and whether all is well. A row is a host's cells, or the reason why there are none.

    ``trips`` are None if they were not measured.
    """
    parts = [_hosts(rows)]
    if trips is not None:
        parts.append(f"round trips between hosts, over gloo\n\n{_trips(trips)}")
    elif len(rows) > 1:
        parts.append("round trips between hosts: not measured, because fewer than two hosts have torch and hvdlite\n")
    todo = [*_todo_of_hosts(rows), *(() if trips is None else _todo_of_round_trips(trips))]
    if todo:
        parts.append("what to do\n\n" + "".join(f"  {_BAD} {line}\n" for line in todo))
    return "\n".join(parts), not todo


def _hosts(rows: Mapping[str, Mapping[str, Cell] | str]) -> str:
    titles = next((list(cells) for cells in rows.values() if not isinstance(cells, str)), [])
    lines = [["host", *(f"  {title}" for title in titles)]]
    for host, cells in rows.items():
        if isinstance(cells, str):  # without what follows in parentheses, which is in the list of what to do
            lines.append([host, f"{_BAD} {cells.partition(' (')[0]}"])
        else:
            lines.append([host, *map(_marked, cells.values())])
    return _aligned(lines)


def _marked(cell: Cell) -> str:
    return f"{_BAD if cell.wrong else _GOOD if cell.text else _NONE} {cell.text}".rstrip()


def _trips(trips: RoundTrips) -> str:
    def cell(host: str, other: str) -> str:
        if host == other:
            return _NONE
        us = trips.times_us.get((host, other), trips.times_us.get((other, host)))
        return _BAD if us is None else f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.1f} ms"

    return _aligned(
        [["", *trips.hosts], *([host, *(cell(host, each) for each in trips.hosts)] for host in trips.hosts)]
    )


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Aligns the lines in columns. A line with fewer cells than others may extend beyond them."""
    count = max(map(len, lines))
    widths = [max((len(line[i]) for line in lines if len(line) == count), default=0) for i in range(count)]
    widths[0] = max(len(line[0]) for line in lines)
    rows = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=False)) for line in lines]
    return "".join(f"{row.rstrip()}\n" for row in rows)


def _todo_of_hosts(rows: Mapping[str, Mapping[str, Cell] | str]) -> Iterator[str]:
    for host, cells in rows.items():
        if isinstance(cells, str):
            yield f"{host}: {cells}"
        else:
            yield from (f"{host}: {cell.wrong}" for cell in cells.values() if cell.wrong)


def _todo_of_round_trips(trips: RoundTrips) -> Iterator[str]:
    for (host, other), why in trips.troubles.items():
        step = "allow TCP between them, or choose another network with --network-interface"
        yield f"{host} and {other}: {why} ({step})"
    for (host, other), why in trips.blocked.items():
        step = "a firewall? Allow TCP there, usually on ports 32768-60999, or choose a network with --network-interface"
        yield f"{host} cannot connect to {other}: {why} ({step})"
