"""With the shim, `import horovod` gives hvdlite, and a program runs as Python itself would run it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from copied_ranks import RankServer
from horovod_names import MODULES, NOT_THERE

import hvdlite.horovod
import hvdlite.torch
from hvdlite.horovod.__main__ import run_program
from hvdlite.horovod.finder import CHILDREN_PATH, Finder


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs the shim for one test."""
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hvdlite.horovod.install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


@pytest.mark.usefixtures("shim")
def test_every_module_that_programs_import_is_there_with_what_they_import_from_it():
    for name, names in MODULES.items():
        module = importlib.import_module(name)
        assert set(names) - NOT_THERE <= set(dir(module)), name
        assert module is sys.modules[f"hvdlite.{name}"]
        assert module.__spec__.name == f"hvdlite.{name}", "reloading and relative imports go by it"


@pytest.mark.usefixtures("shim")
def test_horovod_is_hvdlite_in_every_form_of_import():
    import horovod  # noqa: PLC0415
    import horovod.torch as hvd  # noqa: PLC0415
    from horovod import torch as from_package  # noqa: PLC0415
    from horovod.torch import DistributedOptimizer, mpi_ops  # noqa: PLC0415

    assert horovod.torch is hvd is from_package
    assert DistributedOptimizer is hvdlite.torch.DistributedOptimizer
    assert hvd.__all__ == hvdlite.torch.__all__
    assert mpi_ops.rank is hvdlite.torch.rank
    assert hvd.mpi_ops is mpi_ops
    assert hvd.compression.Compression is hvd.Compression
    assert issubclass(horovod.common.exceptions.HorovodInternalError, RuntimeError)
    assert pickle.loads(pickle.dumps(hvd.allreduce)) is hvdlite.torch.allreduce
    assert tuple(map(int, horovod.__version__.partition("+")[0].split("."))) >= (0, 28, 1)
    assert importlib.util.find_spec("horovod.torch") is not None


@pytest.mark.usefixtures("shim")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import horovod.tensorflow", "horovod.tensorflow: hvdlite supports only PyTorch"),
        ("import horovod.tensorflow.keras", "horovod.tensorflow: hvdlite supports only PyTorch"),
        ("from horovod import keras", "horovod.keras: hvdlite supports only PyTorch"),
        ("import horovod.mxnet", "horovod.mxnet: hvdlite supports only PyTorch"),
        ("import horovod.spark.torch", "horovod.spark.torch: hvdlite has neither estimators nor "),
        ("from horovod.run import run", "horovod.run: it is a function, not a module: from horovod import run"),
        ("from horovod.runner.launch import run_commandline", "hvdlite has no horovodrun: use hvdlite-run --horovod"),
        ("import horovod.torch.nothing", "horovod.torch.nothing: hvdlite does not have this module of Horovod"),
    ],
)
def test_what_is_not_there_says_why(program, words):
    with pytest.raises(ModuleNotFoundError, match=words):
        exec(program)


@pytest.mark.usefixtures("shim")
def test_who_only_asks_for_what_is_not_there_is_told_so_without_an_error():
    for name in ("horovod.tensorflow", "horovod.keras", "horovod.nothing", "horovod.run"):
        assert importlib.util.find_spec(name) is None, name
    assert importlib.util.find_spec("hvdlite.horovod.spark.torch") is None
    with pytest.raises(ModuleNotFoundError, match="hvdlite supports only PyTorch"):
        importlib.import_module("horovod.tensorflow")


@pytest.mark.usefixtures("shim")
def test_children_find_it_before_any_other_and_after_the_programs_own_directory():
    assert sys.path[1] == CHILDREN_PATH
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [CHILDREN_PATH, "somewhere"]
    assert os.listdir(CHILDREN_PATH) == ["horovod"], "whatever else lay there would be found too"
    hvdlite.horovod.install()
    assert sum(isinstance(finder, Finder) for finder in sys.meta_path) == 1
    assert sys.path.count(CHILDREN_PATH) == 1


def test_nothing_named_horovod_is_there_without_the_shim():
    assert not any(isinstance(finder, Finder) for finder in sys.meta_path)
    assert "horovod" not in sys.modules
    assert CHILDREN_PATH not in sys.path


def test_a_horovod_that_is_imported_already_is_not_replaced(monkeypatch):
    other = types.ModuleType("horovod")
    other.__file__ = "/somewhere/horovod/__init__.py"
    monkeypatch.setitem(sys.modules, "horovod", other)
    with pytest.raises(RuntimeError, match=r"imported from /somewhere/horovod/__init__.py already"):
        hvdlite.horovod.install()


@pytest.mark.usefixtures("shim")
def test_the_shims_own_package_may_be_found_through_a_link(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(CHILDREN_PATH)
    own = types.ModuleType("horovod")
    own.__file__ = str(tmp_path / "link" / "horovod" / "__init__.py")
    monkeypatch.setitem(sys.modules, "horovod", own)
    hvdlite.horovod.install()


# -- horovod.run


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Returns the arguments with which `hvdlite.run` is called."""
    calls: list[dict[str, object]] = []

    def run(*args: object, horovod: bool, **flags: object) -> list[int]:
        assert horovod, "workers find it, on whatever host"
        calls.append({"args": args, **{name: value for name, value in flags.items() if value is not None}})
        return [7]

    monkeypatch.setattr(hvdlite, "run", run)
    return calls


def test_run_hands_on_what_it_is_given_by_place_or_name(called, capsys):
    run = hvdlite.horovod.run
    assert run(len, ("ab",), {"c": 1}, 2, hosts="a:1,b:1", ssh_port=22, verbose=2, use_gloo=True) == [7]
    assert called[-1] == {
        "args": (len, ("ab",), {"c": 1}),
        "np": 2,
        "hosts": "a:1,b:1",
        "ssh_port": 22,
        "verbose": True,
    }
    run(len, np=3, network_interfaces=["eth0", "eth1"], output_filename="d", start_timeout=9)
    assert called[-1] == {
        "args": (len, (), None), "np": 3, "network_interface": "eth0,eth1", "output_filename": "d", "start_timeout": 9,
    }  # fmt: skip
    run(len)
    assert called[-1] == {"args": (len, (), None), "np": 1}
    run(len, hostfile="f")
    assert called[-1] == {"args": (len, (), None), "hostfile": "f"}
    assert capsys.readouterr().err == ""


def test_run_says_of_what_has_no_meaning_why(called, capsys):
    hvdlite.horovod.run(len, np=1, use_mpi=True, disable_cache=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "hvdlite: horovod.run(disable_cache=...) has no effect: hvdlite caches nothing between jobs",
        "hvdlite: horovod.run(use_mpi=...) has no effect: workers are started over ssh, without MPI",
    ]
    assert len(called) == 1


def test_run_passes_on_what_is_of_elastic_training(called):
    elastic = {"slots": 2, "reset_limit": 3, "host_discovery_script": "./hosts.sh"}
    run = hvdlite.horovod.run
    run(len, min_num_proc=2, max_num_proc=4, cooldown_range=(10, 20), **elastic)
    assert called[-1] == {
        "args": (len, (), None), "min_np": 2, "max_np": 4, "blacklist_cooldown_range": [10, 20], **elastic,
    }  # fmt: skip
    run(len, np=3, min_np=2, max_np=4)
    assert called[-1] == {"args": (len, (), None), "np": 3, "min_np": 2, "max_np": 4}


def test_run_refuses_another_python_and_two_numbers_of_workers(called):
    with pytest.raises(ValueError, match="workers run in the calling program's Python"):
        hvdlite.horovod.run(len, np=2, executable="/opt/python")
    with pytest.raises(ValueError, match="num_proc and np are the same argument"):
        hvdlite.horovod.run(len, num_proc=2, np=2)
    with pytest.raises(ValueError, match="min_num_proc and min_np are the same argument"):
        hvdlite.horovod.run(len, min_num_proc=2, min_np=2)
    assert not called


# -- programs


def python(*words: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250, check=False, **options)


SHIM = ("-m", "hvdlite.horovod")


@pytest.fixture
def python_copy(rank_server: RankServer) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Provides `python` for processes that import torch."""
    return partial(python, *rank_server.python())


SELF = """
import sys, types
print(sys.argv, __name__, globals().get("__file__"), repr(sys.path[0]), __package__, __spec__ and __spec__.name)
print(sys.modules["__main__"].__dict__ is globals(), sorted(globals()), isinstance(__builtins__, types.ModuleType))
"""

FAILING = """
def inner():
    raise ValueError("the program's own")
try:
    1 / 0
except ZeroDivisionError:
    inner()
"""

# Programs, by the arguments of Python that run them: each runs as if there were no shim.
AS_WITHOUT = {
    "script": (["program.py", "-x", "a b"], SELF),
    "script elsewhere": (["sub/program.py", "-m"], SELF),
    "module": (["-m", "program", "--flag"], SELF),
    "module of a package": (["-m", "sub.program", "x"], SELF),
    "package": (["-m", "sub", "x"], SELF),
    "code": (["-c", SELF, "x", "y"], ""),
    "script that fails": (["program.py"], FAILING),
    "code that fails": (["-c", FAILING], ""),
    "exit code": (["program.py"], "import sys; sys.exit(7)"),
    "exit words": (["program.py"], "raise SystemExit('told why')"),
    "interrupted": (["program.py"], "raise KeyboardInterrupt"),
    "killed": (["program.py"], "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"),
    "syntax error": (["program.py"], "def f(:\n"),
    "future": (["program.py"], "def f(x: int): ...\nprint(f.__annotations__)"),
    "no such script": (["nothing.py"], ""),
    "no such module": (["-m", "nothing"], ""),
    "no such module of a package": (["-m", "nothing.at_all"], ""),
    "own hook": (
        ["program.py"],
        "import sys; sys.excepthook = lambda kind, e, tb: print(e, tb.tb_lineno, tb.tb_next)\nraise ValueError(1)",
    ),
    "exit handler": (
        ["program.py"],
        "import atexit, sys\ndef f(): print(sys.modules['__main__'].f is f, sys.last_value)\natexit.register(f)\n1/0",
    ),
}


@pytest.mark.night(but=6)
@pytest.mark.slow
@pytest.mark.parametrize("case", AS_WITHOUT)
def test_a_program_runs_as_python_itself_would_run_it(case, tmp_path, python_copy):
    words, source = AS_WITHOUT[case]
    (tmp_path / "sub").mkdir()
    for name in ("program.py", "sub/program.py", "sub/__main__.py"):
        (tmp_path / name).write_text(source)
    (tmp_path / "sub" / "__init__.py").touch()
    expected = python(*words, cwd=tmp_path)
    done = python_copy(*SHIM, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert done.stderr.splitlines() == expected.stderr.splitlines()
    assert not list(tmp_path.glob("__pycache__/program*")) or case == "module"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "usage: python -m hvdlite.horovod [-m module | -c code | script.py]"),
        (["--help"], 0, ""),
        (["-u", "x.py"], 2, "Unknown option: -u (Python's own stand before -m hvdlite.horovod)"),
    ],
)
def test_a_program_that_is_not_named_is_an_error_and_help_is_none(words, code, said, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as end:
        run_program(words)
    out, err = capsys.readouterr()
    assert (end.value.code, bool(out)) == (code, code == 0)
    assert err.startswith(said)


@pytest.mark.night(but=2)
@pytest.mark.slow
@pytest.mark.parametrize("before", [(), SHIM], ids=["by its path", "by the shim"])
@pytest.mark.parametrize("name", ["horovod", "horovod.runner.launch"])
def test_horovod_as_a_program_says_what_to_use_in_its_place(tmp_path, python_copy, name, before):
    found = {**os.environ, **({} if before else {"PYTHONPATH": CHILDREN_PATH})}
    done = python_copy(*before, "-m", name, cwd=tmp_path, env=found)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"{sys.executable}: {name} is not a program in hvdlite: ")
    assert "hvdlite-run --horovod" in said


CHILDREN = """
import subprocess, sys
import torch
import horovod.torch as hvd

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        import horovod.torch.mpi_ops
        names = horovod.torch.mpi_ops.__name__, hvd.Compression.fp16.__module__
        return index, names == ("hvdlite.horovod.torch.mpi_ops", "hvdlite.compression.custom")

if __name__ == "__main__":
    hvd.init()
    for method in ("spawn", "forkserver", "fork"):
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, batch_size=4, multiprocessing_context=method)
        print(method, [batch[1].all().item() for batch in loader])
    print(subprocess.check_output([sys.executable, "-c", "import horovod.torch; print(horovod.torch.size.__module__)"]))
    print(subprocess.check_output([sys.executable, "other.py"]))
"""


@pytest.mark.slow
def test_every_child_process_finds_it_too(tmp_path, python_copy):
    (tmp_path / "program.py").write_text(CHILDREN)
    (tmp_path / "other.py").write_text(
        "from horovod.torch.mpi_ops import rank; import horovod; print(horovod.__name__)"
    )
    done = python_copy(*SHIM, "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *(f"{method} [True]" for method in ("spawn", "forkserver", "fork")),
        "b'hvdlite.runtime.world\\n'",
        "b'hvdlite.horovod\\n'",
    ]


@pytest.mark.slow
def test_an_installed_horovod_is_shadowed_by_the_shim_alone(tmp_path):
    (tmp_path / "site" / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").write_text("")
    (tmp_path / "site" / "horovod" / "torch" / "__init__.py").write_text("")
    program = "import hvdlite, hvdlite.torch, horovod.torch, subprocess, sys; print(horovod.__name__, flush=True)\n"
    children = "subprocess.run([sys.executable, '-c', 'import horovod; print(horovod.__name__)'])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    assert python("-c", program + children, cwd=tmp_path, env=env).stdout == "horovod\nhorovod\n"
    under_the_shim = python(*SHIM, "-c", program + children, cwd=tmp_path, env=env)
    assert under_the_shim.stdout == "hvdlite.horovod\nhvdlite.horovod\n"


RUN = """
import horovod, helper, horovod.torch as hvd

if __name__ == "__main__":
    print(horovod.run(helper.elsewhere, ("a",), np=2))
    print(horovod.run(lambda: hvd.init() or hvd.rank(), np=2, use_gloo=True))
"""

HELPER = """
import torch
import horovod.torch as hvd

def elsewhere(word):
    hvd.init()
    return word, hvd.rank(), hvd.allgather(torch.tensor([hvd.rank()])).tolist()
"""


@pytest.mark.slow
def test_functions_that_are_sent_to_workers_find_it_there(tmp_path, rank_server, python_copy):
    (tmp_path / "program.py").write_text(rank_server.line_for_functions() + RUN)
    (tmp_path / "helper.py").write_text(HELPER)
    done = python_copy(*SHIM, "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[('a', 0, [0, 1]), ('a', 1, [0, 1])]", "[0, 1]"]
