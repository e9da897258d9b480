"""
A Python program run as ``python`` itself would run it: script, ``-m module``, ``-c code`` or ``-``.

The same ``sys.argv``, ``sys.path[0]``, ``__main__``, tracebacks and exit codes. What is different for the program has
been done before; see `finder`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

USAGE = "usage: python -m hvdlite.horovod [-m module | -c code | script.py | -] [argument ...]"


def run_program(words: Sequence[str]) -> None:
    """Run the program that ``words`` name after ``python``; raises what it raises, SystemExit included."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    # The module object stays, as the interpreter's own does: what ends later (threads, exit handlers) finds it.
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __spec__=None)
    try:
        sys.modules["__main__"] = main
        exec(_load(list(words), main), main.__dict__)
    except BaseException:
        _show_without_our_frames()
        raise


def _load(words: list[str], main: ModuleType) -> CodeType:
    """The program's code; ``main``, ``sys.argv`` and ``sys.path`` are as it expects them."""
    option, name, rest = words[0][:2], words[0][2:], words[1:]
    if option in ("-m", "-c") and not name:
        if not rest:
            print(f"Argument expected for the {option} option\n{USAGE}", file=sys.stderr)
            sys.exit(2)
        name, *rest = rest
    if option == "-m":
        return _load_module(name, rest, main)
    if option == "-c":
        sys.argv[:] = ["-c", *rest]
        _set_first_path("")
        return compile(name, "<string>", "exec", dont_inherit=True)
    if words[0] == "-":
        sys.argv[:] = words
        _set_first_path("")
        return compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True)
    if option.startswith("-"):
        print(f"Unknown option: {words[0]} (Python's own stand before -m hvdlite.horovod)\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    return _load_script(words, main)


def _load_script(words: list[str], main: ModuleType) -> CodeType:
    script = os.path.abspath(words[0])
    if os.path.isdir(script) or zipfile.is_zipfile(script):
        spec = PathFinder.find_spec("__main__", [script])
        if spec is None:
            sys.exit(f"{sys.executable}: can't find '__main__' module in {script!r}")
        sys.path[0] = script
        sys.argv[:] = words
        return _code_of(spec, main)
    _set_first_path(os.path.dirname(os.path.realpath(script)))
    loader = SourceFileLoader("__main__", script)
    try:
        source = loader.get_data(script)
    except OSError as error:
        print(f"{sys.executable}: can't open file {script!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    sys.argv[:] = words
    main.__dict__.update(__file__=script, __cached__=None, __loader__=loader, __package__=None)
    # Not the loader's get_code, which would leave a cached file beside the script.
    return compile(source, script, "exec", dont_inherit=True)


def _load_module(name: str, rest: list[str], main: ModuleType) -> CodeType:
    sys.argv[:] = ["-m", *rest]
    spec = _spec_of(name)
    if spec is not None and spec.submodule_search_locations is not None:
        package, spec = spec, _spec_of(f"{name}.__main__")
        if spec is None:
            sys.exit(
                f"{sys.executable}: No module named {package.name}.__main__; {package.name!r} is a package and cannot "
                "be directly executed"
            )
    if spec is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    code = _code_of(spec, main)
    sys.argv[:] = [main.__dict__["__file__"], *rest]
    return code


def _code_of(spec: ModuleSpec, main: ModuleType) -> CodeType:
    # What loads Python, from files or archives, has both methods; importlib's classes do not say so of all.
    loader: Any = spec.loader
    try:
        code: CodeType | None = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    except ImportError as error:
        sys.exit(f"{sys.executable}: {error}")
    if code is None:
        sys.exit(f"{sys.executable}: No code object available for {spec.name}")
    main.__dict__.update(
        __file__=loader.get_filename(spec.name),
        __cached__=spec.cached,
        __loader__=loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return code


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError) as error:
        words = f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})"
        sys.exit(f"{sys.executable}: {words}")


def _set_first_path(directory: str) -> None:
    # With -I or -P Python puts no directory of the program there.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = directory


def _show_without_our_frames() -> None:
    """Let the interpreter, or whoever has its hook, show what the program raised from the program's first frame on."""
    show = sys.excepthook

    def show_the_programs(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        sys.excepthook = show
        own = traceback
        while own is not None and own.tb_frame.f_code.co_filename != __file__:
            own = own.tb_next
        while own is not None and own.tb_frame.f_code.co_filename == __file__:
            own = own.tb_next
        show(kind, error.with_traceback(own), own)

    sys.excepthook = show_the_programs
