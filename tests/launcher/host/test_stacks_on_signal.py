"""Which processes have their stacks written on a signal, and that `import torch` sees to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from hvdlite_launcher.host.stacks_on_signal import STACKS_SIGNAL, register

REGISTERS = "from hvdlite_launcher.host.stacks_on_signal import register; register(); "


def files_after(directory: Path, program: str, **env: str) -> list[str]:
    """Returns the names of the files in the directory once a process has run this program."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("HVDLITE_")}
    subprocess.run([sys.executable, "-c", program], env={**own, **env}, check=True, cwd=directory)
    return sorted(each.name for each in directory.iterdir())


def test_torch_calls_it_as_a_backend():
    (found,) = [each for each in entry_points(group="torch.backends") if each.name == "hvdlite"]
    assert found.load() is register


def test_a_process_that_no_hvdlite_run_has_started_registers_and_imports_nothing(tmp_path):
    program = REGISTERS + "import sys; assert not {'faulthandler', 'json'} & sys.modules.keys()"
    assert files_after(tmp_path, program) == []
    assert files_after(tmp_path, program, HVDLITE_JOB_DIR=str(tmp_path)) == []  # as of a fork server


def test_a_process_of_a_data_loader_leaves_no_file(tmp_path):
    (tmp_path / "main.py").write_text(
        "import multiprocessing\n"
        "from hvdlite_launcher.host.stacks_on_signal import register\n"
        "if __name__ == '__main__':\n"
        "    register()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=register)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    assert process.exitcode == 0\n"
    )
    program = "import runpy; runpy.run_path('main.py', run_name='__main__')"
    found = files_after(tmp_path, program, HVDLITE_JOB_DIR=str(tmp_path), HVDLITE_WORKER="0")
    assert len([each for each in found if each.endswith(".stacks")]) == 1


def test_a_handler_of_the_program_stays_and_a_directory_that_is_gone_is_no_error(tmp_path):
    handles = f"import signal; signal.signal({STACKS_SIGNAL}, lambda *_: None); "
    assert files_after(tmp_path, handles + REGISTERS, HVDLITE_JOB_DIR=str(tmp_path), HVDLITE_WORKER="0") == []
    gone = str(tmp_path / "gone")
    assert files_after(tmp_path, REGISTERS, HVDLITE_JOB_DIR=gone, HVDLITE_WORKER="0") == []


def test_both_halves_have_the_same_signal():
    from hvdlite.runtime.hang_report import STACKS_SIGNAL as OF_THE_LIBRARY  # noqa: PLC0415  # imports torch

    assert OF_THE_LIBRARY == STACKS_SIGNAL == signal.SIGRTMAX - 2
