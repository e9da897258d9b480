"""
Runs a Python program as `__main__`, as the interpreter itself would run a script, ``-m module`` or ``-c code``.

The program has the same ``sys.argv``, ``__main__``, tracebacks and exit codes. `fork_server` runs the programs of
forked workers with it, and `hvdlite.horovod.__main__` those under the shim; both have set ``sys.path``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import Any, Literal

Kind = Literal["script", "module", "code"]


def run_main_program(kind: Kind, program: str, arguments: Sequence[str], names: dict[str, Any]) -> None:
    """Runs the program in ``names``, the globals of `__main__`; ``program`` is a path, a module's name, or code.

    Raises whatever the program raises, SystemExit included. The caller must not catch it: the process is to end by it,
    and then shows a traceback that begins at the program's first frame.
    """
    sys.argv[:] = [{"module": "-m", "code": "-c"}.get(kind, program), *arguments]
    # What the interpreter removes before it calls exit handlers.
    of_script = ("__file__", "__cached__") if kind == "script" else ()
    try:
        if kind == "module":
            run_module: Any = vars(runpy)["_run_module_as_main"]  # what the interpreter calls for -m
            run_module(program)
        elif kind == "code":
            exec(compile(program, "<string>", "exec", dont_inherit=True), names)
        else:
            _run_script(os.path.join(os.getcwd(), program), names)
    except SystemExit:
        raise
    except BaseException:
        _show_without_own_frames(names, of_script)
        raise
    for name in of_script:
        names.pop(name, None)


def _run_script(path: str, names: dict[str, Any]) -> None:
    loader = SourceFileLoader("__main__", path)
    names.update(__file__=path, __cached__=None, __loader__=loader, __package__=None)
    # Not the loader's get_code, which would write a .pyc file beside the script.
    exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), names)


def _show_without_own_frames(names: dict[str, Any], of_script: Sequence[str]) -> None:
    """Has the program's `sys.excepthook` called without the frames before the program's first one."""
    show = sys.excepthook

    def show_the_programs(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        sys.excepthook = show
        own = traceback
        while own is not None and own.tb_frame.f_code.co_filename != __file__:
            own = own.tb_next
        while own is not None and own.tb_frame.f_code.co_filename == __file__:
            own = own.tb_next
        sys.last_traceback = own
        show(kind, error.with_traceback(own), own)
        for name in of_script:
            names.pop(name, None)

    sys.excepthook = show_the_programs
