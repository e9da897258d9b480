"""Which processes have their stacks written on a signal, and that `import torch` sees to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import hvdlite_launcher.host
import pytest
from hvdlite_wire.job_contract import STACKS_SIGNAL

HOOK = str(Path(hvdlite_launcher.host.__file__).parent / "path")
REGISTERS = "from hvdlite_launcher.host.worker_hooks import register; register(); "


def files_after(directory: Path, program: str, **env: str) -> list[str]:
    """Returns the names of the files in the directory once a process has run this program."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("HVDLITE_")}
    subprocess.run([sys.executable, "-c", program], env={**own, **env}, check=True, cwd=directory)
    return sorted(each.name for each in directory.iterdir())


def test_torch_can_be_imported_once_the_sources_of_an_installed_hvdlite_are_gone(tmp_path):
    # What an editable install leaves then: the metadata, and none of the modules.
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    info = tmp_path / "hvdlite-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hvdlite\nVersion: 0\n")
    points = re.findall(r'^\[project\.entry-points\."?(.+?)"?\]\n((?:.+\n)*)', project, re.MULTILINE)
    (info / "entry_points.txt").write_text("\n".join(f"[{group}]\n{lines}" for group, lines in points).replace('"', ""))
    # The finder of an editable install of this environment would find them.
    program = "import sys; sys.modules.update(hvdlite=None, hvdlite_launcher=None); import torch; torch.ones(1)"
    files_after(tmp_path, program, PYTHONPATH=str(tmp_path))


def stacks_after(directory: Path, *words: str, **env: str) -> tuple[int, str]:
    """Returns how many files for stacks a worker's Python with these arguments leaves, and its output."""
    job_dir = directory / "job"
    job_dir.mkdir(exist_ok=True)
    own = {key: value for key, value in os.environ.items() if not key.startswith("HVDLITE_")}
    own |= {"HVDLITE_JOB_DIR": str(job_dir), "HVDLITE_WORKER": "0", "PYTHONPATH": HOOK, **env}
    done = subprocess.run([sys.executable, *words], env=own, check=True, cwd=directory, capture_output=True, text=True)
    assert not done.stderr
    return len(list(job_dir.glob("*.stacks"))), done.stdout


# In place of torch, whose import takes seconds.
TORCH = "import sys; print('torch', [each for each in sys.path if each.endswith('host/path')])"


def test_import_torch_registers_in_a_worker_and_the_program_finds_nothing_on_its_path(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    looks = "import importlib.util; importlib.util.find_spec('torch'); import torch; import torch"
    assert stacks_after(tmp_path, "-c", looks) == (1, "torch []\n")


@pytest.mark.parametrize(
    "program", ["print('torch')", "import importlib.util; print(importlib.util.find_spec('torch'))"]
)
def test_a_program_that_does_not_import_torch_registers_nothing(tmp_path, program):
    assert stacks_after(tmp_path, "-c", program)[0] == 0


STATE = "import gc; say = lambda *words: print(*words, gc.isenabled(), gc.get_freeze_count()); "


@pytest.mark.parametrize("end", ["", "; raise ImportError('no torch')"])
def test_torch_is_imported_without_collections_which_go_on_afterwards(tmp_path, end):
    (tmp_path / "torch.py").write_text(f"{STATE}say('in torch'){end}")
    program = STATE + "import contextlib\nwith contextlib.suppress(ImportError): import torch\nsay('after')"
    assert stacks_after(tmp_path, "-c", program)[1] == "in torch False 0\nafter True 0\n"


def test_a_program_that_has_no_collections_or_holds_objects_back_from_them_keeps_it_so(tmp_path):
    (tmp_path / "torch.py").write_text(f"{STATE}say('in torch')")
    out = stacks_after(tmp_path, "-c", STATE + "gc.disable(); import torch; say('after')")[1]
    assert out == "in torch False 0\nafter False 0\n"
    frozen = STATE + "gc.freeze(); count = gc.get_freeze_count(); import torch; print(count == gc.get_freeze_count())"
    assert re.fullmatch(r"in torch True [1-9]\d*\nTrue\n", stacks_after(tmp_path, "-c", frozen)[1])


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_a_program_that_wants_no_such_module_runs_without_it(tmp_path, option):
    assert stacks_after(tmp_path, option, "-c", "print('runs')") == (0, "runs\n")


def test_the_users_own_sitecustomize_runs_too(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own', __name__, __file__)")
    (tmp_path / "torch.py").write_text(TORCH)
    paths = os.pathsep.join([HOOK, str(tmp_path / "own")])
    said = f"own sitecustomize {tmp_path}/own/sitecustomize.py\n"
    program = "import sitecustomize, torch; print(sitecustomize.__file__)"
    found, out = stacks_after(tmp_path, "-c", program, PYTHONPATH=paths)
    assert (found, out) == (1, f"{said}torch []\n{tmp_path}/own/sitecustomize.py\n")


def test_torch_is_imported_where_hvdlite_is_not_installed(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    program = "import sys; sys.modules.update(hvdlite_launcher=None); import torch"
    assert stacks_after(tmp_path, "-c", program) == (0, "torch []\n")


def test_a_process_that_no_hvdlite_run_has_started_registers_and_imports_nothing(tmp_path):
    program = REGISTERS + "import sys; assert not {'faulthandler', 'json'} & sys.modules.keys()"
    assert files_after(tmp_path, program) == []
    assert files_after(tmp_path, program, HVDLITE_JOB_DIR=str(tmp_path)) == []  # as of a fork server


def test_a_process_of_a_data_loader_leaves_no_file(tmp_path):
    (tmp_path / "main.py").write_text(
        "import multiprocessing\n"
        "from hvdlite_launcher.host.worker_hooks import register\n"
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


def test_the_signal_is_a_real_time_signal_that_programs_hardly_use():
    assert STACKS_SIGNAL == signal.SIGRTMAX - 2
