"""`python -m hvdlite.horovod train.py`: installs the shim, then runs the program as ``python`` would run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from hvdlite.worker.main_program import Kind, run_main_program

from . import install

USAGE = "usage: python -m hvdlite.horovod [-m module | -c code | script.py] [argument ...]"


def run_program(words: Sequence[str]) -> None:
    """Runs a program; ``words`` are the arguments that ``python`` would get.

    Raises whatever the program raises, SystemExit included.
    """
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    kind, program, arguments = _program_of(list(words))
    # With -I or -P, Python does not put the program's directory on the path. For -m it is there already.
    if kind != "module" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.path.dirname(os.path.realpath(program)) if kind == "script" else ""
    # It stays in sys.modules, as the interpreter's own does, because threads and exit handlers may still use it.
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __spec__=None)
    run_main_program(kind, program, arguments, main.__dict__)


def _program_of(words: list[str]) -> tuple[Kind, str, list[str]]:
    option, name, arguments = words[0][:2], words[0][2:], words[1:]
    if option in ("-m", "-c"):
        if not name:
            if not arguments:
                _exit(f"Argument expected for the {option} option\n{USAGE}")
            name, *arguments = arguments
        return "module" if option == "-m" else "code", name, arguments
    if option.startswith("-"):
        _exit(f"Unknown option: {words[0]} (Python's own stand before -m hvdlite.horovod)\n{USAGE}")
    script = os.path.abspath(words[0])
    try:
        with open(script):
            return "script", words[0], arguments
    except OSError as error:
        _exit(f"{sys.executable}: can't open file {script!r}: [Errno {error.errno}] {error.strerror}")


def _exit(problem: str) -> NoReturn:
    print(problem, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    install()
    run_program(sys.argv[1:])
