"""Reads the command of a job as one of Python: interpreter, options, and the program with its arguments.

`host.forked_workers` needs the parts to start a worker without a new interpreter. A command that this module does not
understand entirely, or in which a new interpreter matters, has no parts: `parse_python` returns None.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["script", "module", "code"]

_INTERPRETER = re.compile(r"python(\d+(\.\d+)*)?t?")
_SWITCHES = frozenset("bBEIOPqsSu")
# -W and -X have a value in the same word or in the next. These values of -X change nothing after the start of the
# interpreter that a copy of it has not, too.
_X = re.compile(
    r"(dev|faulthandler|no_debug_ranges|utf8(=[01])?|warn_default_encoding|frozen_modules(=\w+)?"
    r"|int_max_str_digits=\d+|pycache_prefix=.*)"
)
# With one of these an interpreter does something of its own at its start or end, or measures from its start on.
_VARIABLES = (
    "COVERAGE_PROCESS_START",
    "PYTHONDEBUG",
    "PYTHONDUMPREFS",
    "PYTHONDUMPREFSFILE",
    "PYTHONINSPECT",
    "PYTHONPERFSUPPORT",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONTRACEMALLOC",
    "PYTHONVERBOSE",
)


@dataclass(frozen=True)
class PythonCommand:
    """A command ``interpreter *options program *arguments``, where the program is a file, ``-m module`` or ``-c code``.

    ``words`` is the whole command, as in `sys.orig_argv`.
    """

    words: tuple[str, ...]
    interpreter: str
    options: tuple[str, ...]
    kind: Kind
    program: str
    arguments: tuple[str, ...]

    def first_path(self, cwd: str) -> str:
        """Returns the `sys.path[0]` that an interpreter in ``cwd`` gives the program."""
        match self.kind:
            case "script":
                return os.path.dirname(os.path.realpath(os.path.join(cwd, self.program)))
            case "module":
                return os.path.realpath(cwd)
            case "code":
                return ""


def parse_python(command: Sequence[str], environment: Mapping[str, str]) -> PythonCommand | None:
    """Returns the parts of a command of a worker with this environment; None if a new interpreter must run it."""
    if not _INTERPRETER.fullmatch(os.path.basename(command[0])) or any(map(environment.get, _VARIABLES)):
        return None
    options: list[str] = []
    words = iter(command[1:])

    def parts(kind: Kind, program: str) -> PythonCommand:
        return PythonCommand(tuple(command), command[0], tuple(options), kind, program, tuple(words))

    for word in words:
        if not word.startswith("-"):
            is_understood = word.endswith(".py")  # else it may be a directory or an archive
            return parts("script", word) if is_understood else None
        switches = word[1:]
        if not switches:
            return None  # the program is read from stdin
        for place, letter in enumerate(switches, 1):
            if letter in _SWITCHES:
                options.append(f"-{letter}")
                continue
            value = switches[place:] or next(words, "")
            if letter in "mc" and value:
                return parts("module" if letter == "m" else "code", value)
            if not value or letter not in "WX" or (letter == "X" and not _X.fullmatch(value)):
                return None
            options += [f"-{letter}", value]
            break
    return None
