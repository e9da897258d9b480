"""
`try_out`: runs tests on a copy of the packages, with one fault in it or none.

    hvdlite, launcher, tests ── copied to a tree ── one text replaced ── pytest there, of some tests ── Verdict
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import inside

ROOT = Path(__file__).resolve().parent.parent.parent

_TEST_LIMIT_S = 120
_LIMIT_S = 900


class TrialError(Exception):
    """A trial that says nothing: the fault has no place, or the tests could not be run."""


@dataclass(frozen=True)
class Mutant:
    """A fault in one line: in ``file``, ``new`` stands for ``old``, which is there once.

    ``name`` says what is wrong, and ``tests`` are the ids of tests that must fail by it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied_to(self, source: str) -> str:
        """Returns the source of the file with the fault; raises a `TrialError` unless its place is there once."""
        count = source.count(self.old)
        if count != 1:
            raise TrialError(
                f"{self.name!r}: {self.file} has its old text {count} times: name the text that does this now, so that "
                f"it is there once\n{self.old}"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """What has become of the tests: ``failed`` names the first that failed, and is None if all passed."""

    failed: str | None
    output: str


def try_out(mutant: Mutant | None, tests: Sequence[str], directory: Path) -> Verdict:
    """Runs ``tests`` in a tree under ``directory`` that has this fault; None for none."""
    tree = directory / "tree"
    _copy(tree)
    if mutant is not None:
        path = tree / mutant.file
        path.write_text(mutant.applied_to(path.read_text()))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
    return _run(tree, tests)


def _copy(tree: Path) -> None:
    for name in ("hvdlite", "launcher", "tests", "docs", "examples"):
        # Other processes write the first now, and rename them; in the second is what examples have downloaded.
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.pyc.*", "data"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, tree / name)
    (tree / "hvdlite_launcher").symlink_to("launcher")
    (tree / "hvdlite_wire").symlink_to("launcher/hvdlite_wire")


def _run(tree: Path, tests: Sequence[str]) -> Verdict:
    # The directory comes first on the path of `python -m pytest`, and by the variable on that of processes it starts.
    options = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "mutants.inside", "-m", "not night")
    command = [sys.executable, "-m", "pytest", *options, f"--timeout={_TEST_LIMIT_S}", *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=_environment(tree),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Verdict(f"one of them, which hangs for {_LIMIT_S} s", output)
    if process.returncode == 0:
        return Verdict(None, output)
    # With pytest-timeout's thread, a test that hangs ends the process before pytest names it.
    if process.returncode != 1:
        raise TrialError(f"pytest ended with exit code {process.returncode}, and no test has failed:\n{output}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return Verdict(failed[1] if failed else "one of them, which hangs", output)


def _environment(tree: Path) -> dict[str, str]:
    """The variables of this process, without those that are for the pytest that this may be part of."""
    others = ("PYTEST_", "TEST_HVDLITE_", "PYTHONSAFEPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    return {**kept, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}", inside.VARIABLE: str(tree)}
