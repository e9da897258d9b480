"""
Has `import torch` call `worker_hooks.register`, in hvdlite-run's workers and the Python programs that they start,
and be imported without collections of garbage.

hvdlite-run puts this directory in front of their PYTHONPATH. Python's `site` imports this module when an interpreter
starts, unless it is started with -I, -E or -S. It takes its directory off `sys.path`, and then runs the `sitecustomize`
that would have been imported without it, if there is one.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any


class _OnTorch:
    """Finds torch as the other finders do, and calls `register` once it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        found = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec: Any = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                _run_uncollected(run, module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _register()

            spec.loader.exec_module = run_and_register
        return spec


def _run_uncollected(run: Callable[[Any], object], module: Any) -> None:
    """Runs a module while the garbage collector is off, which looks at all that it makes time and again.

    There are half a million objects in `import torch`, and little garbage: the collector takes a sixth of its time.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        run(module)
        return
    gc.disable()
    try:
        run(module)
    finally:
        if not gc.get_freeze_count():
            # The new objects become old ones at once, without a look at them: the next collection has no more to do.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _register() -> None:
    try:
        # By name, since it is found where the program finds hvdlite, and not beside this file.
        module = importlib.import_module("hvdlite_launcher.host.worker_hooks")
    except ImportError:
        # An environment without hvdlite: a program without reports is better than none.
        return
    module.register()


def _run_other() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        # `site` goes on as if there was none.
        raise ImportError("there is no other sitecustomize", name="sitecustomize")
    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if os.environ.get("HVDLITE_JOB_DIR") and os.environ.get("HVDLITE_WORKER"):
    sys.meta_path.insert(0, _OnTorch())
_run_other()
