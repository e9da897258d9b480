"""
Runs a Python program as ``python`` itself would run it: a script, ``-m module``, ``-c code`` or ``-``.

The program has the same ``sys.argv``, ``sys.path[0]``, ``__main__``, tracebacks and exit codes. ``__main__.py`` calls
`run_program` after `finder.install`.
"""

from __future__ import annotations

import os
import runpy
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

# The function that the interpreter itself calls for -m, for a directory and for an archive.
_run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # not in the types of the standard library

USAGE = "usage: python -m hvdlite.horovod [-m module | -c code | script.py | -] [argument ...]"


def run_program(words: Sequence[str]) -> None:
    """Runs a program; ``words`` are the arguments that ``python`` would get.

    Raises whatever the program raises, SystemExit included.
    """
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    # It stays in sys.modules, as the interpreter's own does, because threads and exit handlers may still use it.
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __spec__=None)
    try:
        sys.modules["__main__"] = main
        _run(list(words), main)
    except BaseException:
        _show_without_our_frames()
        raise


def _run(words: list[str], main: ModuleType) -> None:
    """Runs the program in the module ``main``, with ``sys.argv`` and ``sys.path`` as it expects them."""
    option, name, rest = words[0][:2], words[0][2:], words[1:]
    if option in ("-m", "-c") and not name:
        if not rest:
            print(f"Argument expected for the {option} option\n{USAGE}", file=sys.stderr)
            sys.exit(2)
        name, *rest = rest
    if option == "-m":
        sys.argv[:] = ["-m", *rest]
        _run_as_main(name)
    elif option == "-c":
        sys.argv[:] = ["-c", *rest]
        _set_first_path("")
        exec(compile(name, "<string>", "exec", dont_inherit=True), main.__dict__)
    elif words[0] == "-":
        sys.argv[:] = words
        _set_first_path("")
        exec(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), main.__dict__)
    elif option.startswith("-"):
        print(f"Unknown option: {words[0]} (Python's own stand before -m hvdlite.horovod)\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    else:
        _run_script(words, main)


def _run_script(words: list[str], main: ModuleType) -> None:
    script = os.path.abspath(words[0])
    if os.path.isdir(script) or zipfile.is_zipfile(script):
        sys.path[0] = script
        sys.argv[:] = words
        _run_as_main("__main__", alter_argv=False)
        return
    _set_first_path(os.path.dirname(os.path.realpath(script)))
    loader = SourceFileLoader("__main__", script)
    try:
        source = loader.get_data(script)
    except OSError as error:
        print(f"{sys.executable}: can't open file {script!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    sys.argv[:] = words
    main.__dict__.update(__file__=script, __cached__=None, __loader__=loader, __package__=None)
    # Not the loader's get_code, which would write a .pyc file beside the script.
    exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)


def _set_first_path(directory: str) -> None:
    # With -I or -P, Python does not put the program's directory on the path.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = directory


def _show_without_our_frames() -> None:
    """Makes the traceback of the program's exception begin at the program's first frame; keeps the exception hook."""
    show = sys.excepthook

    def show_the_programs(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        sys.excepthook = show
        own = traceback
        while own is not None and own.tb_frame.f_code.co_filename != __file__:
            own = own.tb_next
        while own is not None and own.tb_frame.f_code.co_filename in (__file__, runpy.run_module.__code__.co_filename):
            own = own.tb_next
        show(kind, error.with_traceback(own), own)

    sys.excepthook = show_the_programs
