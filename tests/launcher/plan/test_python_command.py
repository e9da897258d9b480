"""Which commands are understood as Python's, and their parts."""

from __future__ import annotations

import pytest
from hvdlite_launcher.plan.python_command import PythonCommand, parse_python


@pytest.mark.parametrize(
    ("command", "options", "kind", "program", "arguments"),
    [
        ("python train.py", "", "script", "train.py", ""),
        ("python3.12 -u train.py --lr 1 -u", "-u", "script", "train.py", "--lr 1 -u"),
        (
            "/env/bin/python3 -uB -Wignore -X dev -W error a/b.py",
            "-u -B -W ignore -X dev -W error",
            "script",
            "a/b.py",
            "",
        ),
        ("python -m train --epochs 2", "", "module", "train", "--epochs 2"),
        ("python -um train -m x", "-u", "module", "train", "-m x"),
        ("python -OOmtrain", "-O -O", "module", "train", ""),
        ("python -c pass a", "", "code", "pass", "a"),
    ],
)
def test_a_command_of_python_has_these_parts(command, options, kind, program, arguments):
    words = tuple(command.split())
    parts = PythonCommand(words, words[0], tuple(options.split()), kind, program, tuple(arguments.split()))
    assert parse_python(words, {}) == parts


@pytest.mark.parametrize(
    "command",
    [
        "./train.sh",
        "train.py",
        "pythonista train.py",
        "torchrun train.py",
        "python",
        "python -",
        "python -i train.py",
        "python -v train.py",
        "python -X importtime train.py",
        "python -X",
        "python -m",
        "python --help-env train.py",
        "python directory",
        "python archive.zip",
    ],
)
def test_any_other_command_has_no_parts(command):
    assert parse_python(command.split(), {}) is None


@pytest.mark.parametrize("variable", ["PYTHONINSPECT", "PYTHONTRACEMALLOC", "COVERAGE_PROCESS_START"])
def test_variables_that_an_interpreter_reads_at_its_start_or_end_need_a_new_one(variable):
    assert parse_python(["python", "train.py"], {variable: "1"}) is None
    assert parse_python(["python", "train.py"], {variable: ""}) is not None


def test_the_first_path_is_that_of_the_program(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    (tmp_path / "link.py").symlink_to("code/train.py")
    cwd = str(tmp_path)

    def first_path(*words: str) -> str:
        parts = parse_python(["python", *words], {})
        assert parts is not None
        return parts.first_path(cwd)

    assert (
        first_path("link.py") == first_path("code/train.py") == first_path("./code/../code/train.py") == f"{cwd}/code"
    )
    assert first_path("-m", "train") == cwd
    assert first_path("-c", "pass") == ""
