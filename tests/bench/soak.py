"""
`python tests/bench/soak.py`: trains in windows with faults and without, in turns, and reports what the faults cost.

    Soak ── hvdlite-run --survive, for each window ── soak_worker on each rank ── Line ── Window ── report

Each window is a job of its own. Workers write a `Line` for each finished step; `Training` is what follows from them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hvdlite.bench.arguments import OptionError, read_count, show_count, show_ratio, show_time
from hvdlite.bench.report import Columns, Row, ratio_of, spread, table

BATCH = 16
"""The samples of a rank in one step."""
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


class Line(NamedTuple):
    """One finished step of one worker.

    ``round`` counts the calls of the training function, and is the same on all ranks: a step that is repeated after
    a loss is in a later round. ``hashed`` is the hash of the parameters after the step, None where none was taken.
    """

    round: int
    step: int
    at_s: float
    samples: int
    hashed: str | None

    def text(self) -> str:
        """Returns it as a line of a file."""
        return f"{self.round} {self.step} {self.at_s:.6f} {self.samples} {self.hashed or '-'}\n"


class Training(NamedTuple):
    """What the workers of one window have trained.

    ``seconds`` is the time from the end of the first step to that of the last; ``steps`` and ``samples`` are those
    finished in it, a repeated step counted once. ``repeated`` counts the steps that were done again. ``pause_s`` is the
    longest time between two steps. ``compared`` counts the steps after which several ranks took a hash, and ``unequal``
    those of them after which their hashes differed.
    """

    seconds: float
    steps: int
    samples: int
    repeated: int
    pause_s: float
    compared: int
    unequal: int


def read_lines(directory: Path) -> list[list[Line]]:
    """Returns the lines of each worker. A last line that a killed worker has not finished is left out."""
    return [_lines_of(path.read_text()) for path in sorted(directory.glob("*.txt"))]


def _lines_of(text: str) -> list[Line]:
    found = []
    for line in text.split("\n")[:-1]:
        number, step, at_s, samples, hashed = line.split()
        found.append(Line(int(number), int(step), float(at_s), int(samples), None if hashed == "-" else hashed))
    return found


def training_of(workers: Iterable[Sequence[Line]]) -> Training | None:
    """Returns what these workers have trained, or None if that is less than two steps."""
    rounds: defaultdict[int, defaultdict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for lines in workers:
        for line in lines:
            rounds[line.step][line.round].append(line)
    if len(rounds) < 2:
        return None
    # Of a repeated step the last round counts.
    counted = [by_round[max(by_round)] for _, by_round in sorted(rounds.items())]
    ends = sorted(max(line.at_s for line in lines) for lines in counted)
    hashes = [
        [line.hashed for line in lines if line.hashed is not None]
        for by_round in rounds.values()
        for lines in by_round.values()
    ]
    several = [each for each in hashes if len(each) > 1]
    return Training(
        seconds=ends[-1] - ends[0],
        steps=len(counted) - 1,
        samples=sum(line.samples for lines in counted[1:] for line in lines),
        repeated=sum(len(by_round) - 1 for by_round in rounds.values()),
        pause_s=max(later - earlier for earlier, later in pairwise(ends)),
        compared=len(several),
        unequal=sum(len(set(each)) > 1 for each in several),
    )


def read_seconds(text: str) -> float:
    """Returns the text as a number of seconds, from a tenth to 11 days."""
    with suppress(ValueError):
        if 0.1 <= float(text) < 1e6:
            return float(text)
    raise OptionError(f"{text!r} is not a number of seconds, such as 30")


def read_kinds(text: str) -> tuple[str, ...]:
    """Returns kinds of faults such as ``kill+segv``, without duplicates."""
    kinds = tuple(dict.fromkeys(text.split("+")))
    for each in kinds:
        if each not in _KINDS:
            raise OptionError(f"{each!r} is not a kind of fault: choose from {', '.join(_KINDS)}, joined by +")
    return kinds


def read_seed(text: str) -> int:
    """Returns the text as a whole number of at most six digits."""
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise OptionError(f"{text!r} is not a whole number from 0 to 999999")
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
class Soak:
    """The windows of one command line, run one after the other, in pairs: with faults and without."""

    np: int = 4
    every: float = 30.0
    seconds: float = 1800.0
    faults: tuple[str, ...] = ("kill", "segv")
    seed: int = 0

    def __post_init__(self) -> None:
        if self.np < 2:
            raise OptionError("-np: a rank that is alone cannot go on after a fault: say at least 2")
        if self.seconds < 2 * self.every:
            raise OptionError(
                f"--for: half of {self.seconds:g} s is without faults, and the rest is too short for one in each "
                f"{self.every:g} s: say at least {2 * self.every:g}"
            )
        self.pairs = max(1, int(self.seconds / (2 * _FAULTS_PER_WINDOW * self.every)))
        self.window_s = self.seconds / (2 * self.pairs)
        self.windows: list[Window] = []

    def run(self) -> None:
        """Runs all windows. Those that have ended are in ``windows``, whatever ends this."""
        for pair in range(self.pairs):
            for has_faults in (True, False) if pair % 2 else (False, True):
                print(f"window {len(self.windows) + 1} of {2 * self.pairs}, {_NAMES[has_faults]}", file=sys.stderr)
                self.windows.append(self._window(has_faults, self.seed + pair))

    def _window(self, has_faults: bool, seed: int) -> Window:
        """Runs the job of one window, and ends it if this process is interrupted."""
        mark = f"{uuid.uuid4()}"
        with tempfile.TemporaryDirectory(prefix="hvdlite-soak-") as name:
            directory, chaos_file = Path(name), Path(name) / "chaos.json"
            # None in a worker's last steps: the job fails if rank 0 is killed there, where the others are done.
            count = max(1, int((self.window_s - _END_S) / self.every))
            spec = f"seed={seed},every={self.every:.3f}s,faults={'+'.join(self.faults)},count={count}"
            chaos = ["--chaos", spec, "--chaos-report", str(chaos_file)] if has_faults else []
            job = ["-np", f"{self.np}", "--min-np", "1", "--max-np", f"{self.np}", "--max-restarts", "99999"]
            worker = [sys.executable, str(Path(__file__).with_name("soak_worker.py")), f"{self.window_s}", name]
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


def report_of(windows: Sequence[Window], ranks: int, window_s: float) -> tuple[str, Row]:
    """Returns the report of these windows as text and for JSON. ``is_right`` is whether all of them went well."""
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
    data = {**about, "rows": shown, **totals, "windows": [each.data() for each in windows], "is_right": is_right}
    return text, data


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


def parsed(words: Sequence[str] | None) -> tuple[Soak, Path | None]:
    """Returns the soak of a command line, and its JSON file. Raises OptionError or exits for a wrong one."""
    parser = argparse.ArgumentParser(description="Trains with and without faults, in turns.", allow_abbrev=False)
    parser.add_argument("-np", type=read_count, default=4, metavar="N", help="ranks (%(default)s)")
    parser.add_argument("--every", type=read_seconds, default=30.0, metavar="SECONDS", help="about one fault in each")
    for_help = "of training, half of them with faults (%(default)s)"
    parser.add_argument("--for", type=read_seconds, default=1800.0, metavar="SECONDS", dest="seconds", help=for_help)
    faults_help = f"of {', '.join(_KINDS)} (kill+segv)"
    parser.add_argument("--faults", type=read_kinds, default=("kill", "segv"), metavar="KIND+...", help=faults_help)
    parser.add_argument("--seed", type=read_seed, default=0, metavar="N", help="of the faults (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    given = vars(parser.parse_args(words))
    file = given.pop("json")
    return Soak(**given), file


def main() -> int:
    """Runs the soak, and returns 0 if all of its windows went well. Ctrl-C keeps the windows so far."""
    try:
        soak, file = parsed(None)
    except OptionError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    # The job of a window is ended by what ends this.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    complete = False
    try:
        soak.run()
        complete = True
    except KeyboardInterrupt:
        print("interrupted: this was measured so far", file=sys.stderr)
    text, data = report_of(soak.windows, soak.np, soak.window_s)
    print(text)
    if file is not None:
        file.write_text(json.dumps({"complete": complete, **data}, indent=1) + "\n")
    return 0 if complete and data["is_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
