"""`hvd.run` in cells of a real Jupyter kernel: what is shown, errors, and the stop button."""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
PATIENCE_S = 150


class Done(NamedTuple):
    """What a cell has shown: its output, its value, and its traceback with the exception's name before it."""

    output: str
    value: str
    error: str


class Kernel:
    """A Jupyter kernel that runs cells one after the other."""

    def __init__(self, folder: Path) -> None:
        jupyter = pytest.importorskip("jupyter_client")
        pytest.importorskip("ipykernel")
        self._manager = jupyter.KernelManager(connection_file=str(folder / "kernel.json"))
        # This Python, whatever kernels are installed.
        words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = jupyter.kernelspec.KernelSpec(argv=words, display_name="", language="python")
        # With pytest's own variable a kernel would not show what processes write.
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self._manager.start_kernel(cwd=str(folder), env=env)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE_S)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._manager.provisioner.pid)

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def begin(self, code: str) -> str:
        asked: str = self._client.execute(code)
        return asked

    def shown(self, asked: str, until: str | None = None) -> Done:
        """Returns what the cell shows until it has ended, or until its output has the words."""
        output = value = error = ""
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at:
            try:
                message = self._client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "stream":
                output += content["text"]
            elif kind == "execute_result":
                value = content["data"]["text/plain"]
            elif kind == "error":
                error = "\n".join([content["ename"], *content["traceback"]])
            if (kind == "status" and content["execution_state"] == "idle") or (until is not None and until in output):
                return Done(output, value, re.sub(r"\x1b\[[0-9;]*m", "", error))
        raise AssertionError(f"the cell has not ended: {output}{error}")

    def run(self, code: str) -> Done:
        return self.shown(self.begin(code))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


def test_the_example_trains_and_shows_what_its_ranks_print(kernel):
    cells = [
        "".join(cell["source"]) for cell in json.loads(EXAMPLE.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    for cell in cells:
        done = kernel.run(cell)
        assert not done.error, done
    assert "[0]<stdout>:epoch 40: loss" in done.output
    first, second = eval(done.value)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["accuracy"] == second["accuracy"] > 0.9


def test_an_error_of_a_rank_is_one_of_the_cell_and_the_stop_button_ends_all_ranks(kernel):
    define = """
import os, time
import hvdlite_launcher

def fail():
    if os.environ["HVDLITE_RANK"] == "1":
        raise LookupError("of rank 1")
    time.sleep(1000)

def wait():
    print("waits", flush=True)
    time.sleep(1000)
"""
    assert not kernel.run(define).error
    failed = kernel.run("hvdlite_launcher.run(fail, np=2)")
    assert failed.error.startswith("LookupError\n")
    assert "in fail" in failed.error, "the worker's traceback"
    asked = kernel.begin("hvdlite_launcher.run(wait, np=2)")
    kernel.shown(asked, until="waits")
    started = kernel.process.children(recursive=True)
    kernel.interrupt()
    assert kernel.shown(asked).error.startswith("KeyboardInterrupt\n")
    gone, alive = psutil.wait_procs(started, timeout=30)
    assert len(gone) >= 3
    assert not alive
    assert kernel.run("1 + 1").value == "2"
