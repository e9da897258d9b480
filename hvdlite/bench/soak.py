"""
`soak`: trains in windows with faults and without, in turns, and reports what the faults cost.

    Soak ── hvdlite-run --survive, for each window ── soak_worker on each rank ── soak_lines ── Window ── Report

Each window is a job of its own. It runs outside of any job.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..rendezvous.launchers import read_placement
from .arguments import UsageError, flag, read_count, read_seconds
from .plot import Chart, Line, Lines
from .ranks import Ranks
from .report import Columns, Command, Report, Row, ratio_of, spread, table
from .soak_lines import BATCH, Training, read_lines, training_of
from .units import show_count, show_ratio, show_time

# The kinds of faults that hvdlite-run causes by the clock in a job on one host.
_KINDS = ("kill", "segv", "stop")
_FAULTS_PER_WINDOW = 5
_TEARDOWN_S = 25.0
_END_S = 1.0  # without faults, at the end of a window
_MARK = "SOAK_WINDOW"
_TAIL = 8000
_NAMES = {True: "with faults", False: "without"}
_RATE = "samples_per_s"
_SUMMARY_COLUMNS: Columns = {
    "": lambda row: row["variant"],
    "windows": lambda row: str(row["count"]),
    "samples/s": lambda row: f"{row[f'median_{_RATE}']:.0f}",
    "quartiles": lambda row: f"{row[f'low_{_RATE}']:.0f} to {row[f'high_{_RATE}']:.0f}",
    "steps/s": lambda row: f"{row['steps_per_s']:.1f}",
    "longest pause": lambda row: show_time(row["pause_s"]),
    "faults": lambda row: str(row["faults"]),
    "steps repeated": lambda row: str(row["repeated"]),
    "compared": lambda row: str(row["compared"]),
    "× without": lambda row: show_ratio(row["times_without"]),
}


def read_kinds(text: str) -> tuple[str, ...]:
    """Returns kinds of faults such as ``kill+segv``, without duplicates."""
    kinds = tuple(dict.fromkeys(text.split("+")))
    for each in kinds:
        if each not in _KINDS:
            raise UsageError(f"{each!r} is not a kind of fault: choose from {', '.join(_KINDS)}, joined by +")
    return kinds


def read_seed(text: str) -> int:
    """Returns the text as a whole number of at most six digits."""
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise UsageError(f"{text!r} is not a whole number from 0 to 999999")
    return int(text)


@dataclass(frozen=True)
class Window:
    """One window: its training, None if it failed; the kinds of its faults; and how many processes were left behind.

    ``left`` is None where processes cannot be listed. ``failure`` says how the job ended, if not with exit code 0.
    """

    has_faults: bool
    training: Training | None
    kinds: Sequence[str]
    left: int | None
    failure: str | None = None

    def data(self) -> Row:
        """Returns it for JSON."""
        return {**asdict(self), "training": self.training and self.training._asdict()}


@dataclass
class Soak(Command):
    """The command `soak`: the speed of a job under faults beside that of one without, and whether it stays right."""

    name = "soak"
    help = "trains with and without faults, in turns: what faults cost, and whether all ranks stay equal"
    is_for_cpu = True
    np: int = field(default=4, metadata=flag("N", read_count, "ranks (%(default)s)", "-np"))
    every: float = field(default=30.0, metadata=flag("SECONDS", read_seconds, "about one fault in each (%(default)s)"))
    seconds: float = field(
        default=1800.0,
        metadata=flag("SECONDS", read_seconds, "of training, half of them with faults (%(default)s)", "--for"),
    )
    faults: tuple[str, ...] = field(
        default=("kill", "segv"), metadata=flag("KIND+...", read_kinds, f"of {', '.join(_KINDS)} (kill+segv)")
    )
    seed: int = field(default=0, metadata=flag("N", read_seed, "of the faults (%(default)s)"))

    def __post_init__(self) -> None:
        if self.np < 2:
            raise UsageError("-np: a rank that is alone cannot go on after a fault: say at least 2")
        if self.seconds < 2 * self.every:
            raise UsageError(
                f"--for: half of {self.seconds:g} s is without faults, and the rest is too short for one in each "
                f"{self.every:g} s: say at least {2 * self.every:g}"
            )
        self._pairs = max(1, int(self.seconds / (2 * _FAULTS_PER_WINDOW * self.every)))
        self._window_s = self.seconds / (2 * self._pairs)
        self._windows: list[Window] = []
        self.turns = 2 * self._pairs

    def prepare(self, ranks: Ranks) -> None:
        if ranks.size > 1 or read_placement(os.environ) is not None:
            raise UsageError("it starts jobs of its own with hvdlite-run: start it outside of any job")

    def run(self, ranks: Ranks) -> None:
        for pair in range(self._pairs):
            for has_faults in (True, False) if pair % 2 else (False, True):
                ranks.progress(_NAMES[has_faults])
                self._windows.append(self._window(has_faults, self.seed + pair))
                ranks.progress(_NAMES[has_faults], 1)

    def _window(self, has_faults: bool, seed: int) -> Window:
        """Runs the job of one window, and ends it if this process is interrupted."""
        mark = f"{uuid.uuid4()}"
        with tempfile.TemporaryDirectory(prefix="hvdlite-soak-") as name:
            directory, chaos_file = Path(name), Path(name) / "chaos.json"
            # None in a worker's last steps: the job fails if rank 0 is killed there, where the others are done.
            count = max(1, int((self._window_s - _END_S) / self.every))
            spec = f"seed={seed},every={self.every:.3f}s,faults={'+'.join(self.faults)},count={count}"
            chaos = ["--chaos", spec, "--chaos-report", str(chaos_file)] if has_faults else []
            job = ["-np", f"{self.np}", "--min-np", "1", "--max-np", f"{self.np}", "--max-restarts", "99999"]
            worker = [sys.executable, "-m", "hvdlite.bench.soak_worker", f"{self._window_s}", name]
            with (directory / "stderr").open("w+b") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-m", "hvdlite_launcher", *job, "--survive", *chaos, *worker],
                    env={**os.environ, _MARK: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    start_new_session=True,  # Ctrl-C comes to this process alone, which then ends the job
                )
                try:
                    code = process.wait()
                finally:
                    if process.poll() is None:
                        process.terminate()
                        process.wait()
            said = (directory / "stderr").read_text(errors="replace")[-_TAIL:]
            found = json.loads(chaos_file.read_text())["faults"] if chaos_file.exists() else []
            training = training_of(read_lines(directory))
        failure = None if code == 0 else f"exit code {code}:\n{said}"
        if failure is None and training is None:
            failure = f"there was no time for two steps: make --for longer than {self.seconds:g}"
        return Window(has_faults, training, [each["kind"] for each in found], _left_behind(mark), failure)

    def report(self) -> Report:
        return report_of(self._windows, self.np, self._window_s)


def _left_behind(mark: str) -> int | None:
    """Returns the number of processes with this mark, once there are none or `_TEARDOWN_S` later."""
    if not Path("/proc/self/environ").exists():
        return None
    give_up_at = time.monotonic() + _TEARDOWN_S
    while (count := _count_marked(f"{_MARK}={mark}".encode())) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    return count


def _count_marked(entry: bytes) -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            count += entry in path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
    return count


def report_of(windows: Sequence[Window], ranks: int, window_s: float) -> Report:
    """Returns the report of these windows. Its exit code is 1 if one failed, ranks differed or processes were left."""
    rows = [_row_of(windows, has_faults) for has_faults in (False, True)]
    shown = [row for row in rows if row is not None]
    without = rows[0][f"median_{_RATE}"] if rows[0] is not None else None
    for row in shown:
        row["times_without"] = ratio_of(row[f"median_{_RATE}"], without)
    kinds = Counter(kind for window in windows for kind in window.kinds)
    trained = [window.training for window in windows if window.training is not None]
    totals: dict[str, Any] = {
        "faults": dict(sorted(kinds.items())),
        "steps_repeated": sum(each.repeated for each in trained),
        "steps_compared": sum(each.compared for each in trained),
        "steps_unequal": sum(each.unequal for each in trained),
        "processes_left": None
        if any(each.left is None for each in windows)
        else sum(each.left or 0 for each in windows),
        "failures": [each.failure for each in windows if each.failure is not None],
    }
    title = f"a job of {show_count(ranks, 'rank')} with --survive, in windows of {show_time(window_s)}"
    text = f"{title}\n\n{_notes(totals)}"
    if shown:
        text = f"{table(title, shown, _SUMMARY_COLUMNS, text_columns=1)}\n\n{_notes(totals)}"
    is_right = not (totals["failures"] or totals["steps_unequal"] or totals["processes_left"])
    about = {"ranks": ranks, "device": "cpu", "batch": BATCH, "window_s": window_s}
    data = {**about, "rows": shown, **totals, "windows": [each.data() for each in windows]}
    return Report(text, data, _chart_of(shown, title), 0 if is_right else 1)


def _row_of(windows: Sequence[Window], has_faults: bool) -> Row | None:
    of_kind = [window for window in windows if window.has_faults == has_faults]
    trained = [window.training for window in of_kind if window.training is not None and window.failure is None]
    if not trained:
        return None
    return {
        "variant": _NAMES[has_faults],
        **spread([each.samples / each.seconds for each in trained], _RATE),
        "steps_per_s": median(each.steps / each.seconds for each in trained),
        "pause_s": max(each.pause_s for each in trained),
        "faults": sum(len(window.kinds) for window in of_kind),
        "repeated": sum(each.repeated for each in trained),
        "compared": sum(each.compared for each in trained),
    }


def _notes(totals: Row) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in totals["faults"].items())
    compared, unequal, left = totals["steps_compared"], totals["steps_unequal"], totals["processes_left"]
    equal = f"equal on all ranks after each of the {compared} steps that were compared"
    if unequal:
        equal = f"NOT EQUAL on all ranks after {unequal} of the {compared} steps that were compared"
    elif not compared:
        equal = "never compared, since there were never two ranks"
    lines = [
        f"faults: {kinds or 'none'}",
        f"steps that were lost and done again: {totals['steps_repeated']}",
        f"parameters: {equal}",
        f"processes left behind: {'cannot be listed here' if left is None else left}",
        *(f"a window failed: {each}" for each in totals["failures"]),
    ]
    return "\n".join(lines)


def _chart_of(rows: Sequence[Row], caption: str) -> Chart:
    lines = [
        Line(row["variant"], list(enumerate(row[f"samples_{_RATE}"], 1)), row["variant"] == _NAMES[True])
        for row in rows
    ]
    panels = [
        Lines("speed with faults and without", "window", "samples per second", "{:g}".format, "{:g}".format, lines)
    ]
    return Chart("What faults cost", caption, panels)
