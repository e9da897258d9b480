"""Functions that run() calls in many workers, from programs as users write them."""

import signal

import psutil
import pytest
from e2e.conftest import wait_until

# Callers, launchers and workers import torch and connect, while the cores may have other work.
ENDED_S = 150

pytestmark = pytest.mark.slow

WAITS = """
import hvdlite_launcher, os, signal, sys

def wait():
    print("waits", flush=True)
    signal.pause()

try:
    hvdlite_launcher.run(wait, np=2)
except BaseException as error:
    print("caught", repr(error), flush=True)
    sys.exit(7)
"""


@pytest.fixture
def program(launch, tmp_path, rank_server):
    """Starts a main program with this text; ``ended`` returns its exit code and output too."""

    def start(text, python=(), **popen):
        path = tmp_path / "program.py"
        path.write_text(rank_server.line_for_functions() + text.removeprefix("\n"))
        return launch(str(path), program=python, **popen)

    return start


@pytest.fixture
def passes(program, rank_server):
    """Returns the output of a main program that checks its results itself; asserts that it leaves nothing behind."""

    def run(text, **popen):
        job = program(text, rank_server.python(), **popen)
        code, out, err = job.ended(ENDED_S)
        assert code == 0, err.decode()
        assert not job.leftovers()
        assert not job.processes()
        return out.decode()

    return run


def test_what_a_function_returns_comes_back_by_rank_and_what_it_prints_is_shown(passes):
    out = passes(
        """
import sys
import torch
import hvdlite as hvd

print("before")

def train(factor, *, bias):
    hvd.init()
    print("trains", repr(sys.stdin.read()))
    return hvd.rank(), hvd.allreduce(torch.ones(2) * hvd.rank() * factor, name="x").sum().item() + bias

if __name__ == "__main__":
    assert hvd.run(train, (3,), {"bias": 0.5}, np=2) == [(0, 3.5), (1, 3.5)]
""",
        stdin=-1,
    )
    assert out.splitlines()[0] == "before"
    assert sorted(out.splitlines()[1:]) == ["[0]<stdout>:trains ''", "[1]<stdout>:trains ''"]


def test_functions_and_classes_need_no_module_that_workers_could_import(launch, rank_server):
    """As in a notebook: the main program is no file."""
    text = """
import dataclasses, os
from hvdlite_launcher import run

@dataclasses.dataclass
class Place:
    rank: int

class Lonely(Exception):
    pass

def where():
    return Place(int(os.environ["HVDLITE_RANK"]))

def complain():
    raise Lonely(where())

captured = {"a": 1}
assert run(where, np=2) == [Place(0), Place(1)]
assert run(lambda: (captured, os.environ["HVDLITE_SIZE"]), np=1) == [({"a": 1}, "1")]
try:
    run(complain, np=1)
except Lonely as error:
    assert error.args == (Place(0),)
else:
    raise AssertionError
"""
    job = launch("-c", rank_server.line_for_functions() + text, program=())
    code, _, err = job.ended(ENDED_S)
    assert code == 0, err.decode()


@pytest.mark.night
def test_modules_beside_the_main_program_are_found_wherever_it_is_started(passes, tmp_path):
    (tmp_path / "beside.py").write_text("def answer(): return 42\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "queue.py").write_text("raise ImportError('not the queue that was meant')\n")
    passes(
        "import beside, os, hvdlite_launcher; assert hvdlite_launcher.run(beside.answer, np=1) == [42]\n"
        "assert hvdlite_launcher.run(os.getcwd, np=1) == [os.getcwd()]",
        cwd=tmp_path / "elsewhere",
    )


def test_the_first_failing_workers_exception_is_raised_with_its_traceback_and_rank(passes):
    out = passes(
        """
import traceback
import hvdlite as hvd

class WrongShape(ValueError):
    pass

def train():
    hvd.init()
    if hvd.rank() == 1:
        raise WrongShape("on purpose", 3)
    hvd.barrier()

try:
    hvd.run(train, np=3)
except WrongShape as error:
    assert error.args == ("on purpose", 3)
    print("".join(traceback.format_exception(type(error), error, error.__traceback__)))
"""
    )
    cause, _, own = out.partition("The above exception was the direct cause of")
    assert 'rank 1 on localhost:\n"""\nTraceback (most recent call last):\n' in cause
    assert 'raise WrongShape("on purpose", 3)' in cause
    assert "hvdlite/call.py" not in cause
    assert own.rstrip().endswith("WrongShape: ('on purpose', 3)")


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("os._exit(3)", r"rank 0 on localhost \(pid \d+\) failed first, with exit code 3\."),
        (
            "print('last words', file=sys.stderr); os._exit(3)",
            r"with exit code 3\. The end of its stderr:\n *last words",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"rank 0 on localhost .* killed by SIGKILL"),
        ("sys.exit('no data')", r"exit code 1\. The end of its stderr:\n *no data"),
        ("os._exit(0)", "rank 0 ended with exit code 0 before the function returned"),
        ("raise TwoArguments(1, 2)", "rank 0 on localhost raised .*TwoArguments: 1 and 2"),
        ("raise Local()", "rank 0 on localhost raised .*Local"),
        ("return NotThere()", "the value that rank 0 returned cannot be unpickled here: RuntimeError: only once"),
    ],
)
def test_a_worker_that_ends_otherwise_is_named(passes, body, said):
    passes(
        f"""
import os, re, signal, sys, threading
from hvdlite_launcher import JobError, run

class TwoArguments(Exception):
    def __init__(self, one, two):
        super().__init__(f"{{one}} and {{two}}")

class Local(Exception):
    def __init__(self):
        self.lock = threading.Lock()

def fails():
    raise RuntimeError("only once")

class NotThere:
    def __reduce__(self):
        return fails, ()

def work():
    {body}

try:
    run(work, np=1)
except JobError as error:
    assert re.search({said!r}, str(error)), error
else:
    raise AssertionError
"""
    )


@pytest.mark.night
def test_what_cannot_be_pickled_on_its_way_back_is_named(passes):
    passes(
        """
import pickle, threading
from hvdlite_launcher import run

try:
    run(threading.Lock, np=1)
except pickle.PicklingError as error:
    reason = "cannot pickle '_thread.lock' object"
    assert str(error) == f"what the function returned cannot be pickled, to be sent back: {reason}"
else:
    raise AssertionError
"""
    )


@pytest.mark.night
def test_what_is_large_goes_there_and_comes_back(passes):
    passes(
        "import os; from hvdlite_launcher import run; data = os.urandom(50_000_000)\n"
        "assert run(lambda sent: sent[::-1], (data,), np=2) == [data[::-1]] * 2"
    )


@pytest.mark.night
def test_it_may_be_called_in_threads_beside_other_children_and_leaves_these_alone(passes):
    passes(
        """
import subprocess
from concurrent.futures import ThreadPoolExecutor
from hvdlite_launcher import run

with subprocess.Popen(["sleep", "1000"]) as child, ThreadPoolExecutor() as threads:
    jobs = [threads.submit(run, lambda number: number, (number,), np=1) for number in range(2)]
    assert [job.result() for job in jobs] == [[0], [1]]
    assert child.poll() is None
    child.kill()
"""
    )


@pytest.mark.night
def test_flags_are_arguments(passes, tmp_path):
    (tmp_path / "config.yaml").write_text("np: 3\nenvironment: {A: file, B: file}\n")
    out = passes(
        f"""
import os
from hvdlite_launcher import run

def names():
    print("shown")
    return [os.environ.get(name) for name in ("A", "B", "TOKEN", "HVDLITE_SIZE")]

environment = {{"A": "a=b c", "TOKEN": None}}
config_file = {str(tmp_path / "config.yaml")!r}
assert run(names, hosts=["localhost:1", "127.0.0.1:1"], output_filename={str(tmp_path)!r}, no_env=True,
           environment={{**environment, "TEST_HVDLITE_MARK": None}}, config_file=config_file, np=2) == [
    ["a=b c", "file", "s3cret", "2"]
] * 2
""",
        env={"TOKEN": "s3cret", "OTHER": "x"},
    )
    assert out.count("shown") == 2
    assert (tmp_path / "rank.1" / "stdout").read_text() == "shown\n"


SURVIVES = """
import os, signal
import torch
import hvdlite as hvd

def batch(worker, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + worker), dtype=torch.float64)

def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    hvd.init()
    worker = int(os.environ["HVDLITE_WORKER"])
    model, optimizer = made()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(batch(worker, step)).square().mean().backward()
        if (worker, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    return worker, [param.tolist() for param in model.parameters()]

if __name__ == "__main__":
    model, optimizer = made()
    for step in range(4):
        optimizer.zero_grad()
        alive = [0, 1, 2] if step < 2 else [0, 2]
        for worker in alive:
            (model(batch(worker, step)).square().mean() / len(alive)).backward()
        optimizer.step()
    for flags in ({"survive": True, "min_np": 1, "on_failure": "shrink"}, {"config_file": "job.yaml"}):
        results = hvd.run(train, np=3, **flags)
        assert [worker for worker, _ in results] == [0, 2], results
        for _, params in results:
            for mine, expected in zip(params, model.parameters(), strict=True):
                torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)
"""


def test_a_function_whose_job_survives_returns_what_the_ranks_that_are_left_have_trained(passes, tmp_path):
    (tmp_path / "job.yaml").write_text("survive: true\nmin-np: 1\non-failure: shrink\n")
    passes(SURVIVES, cwd=tmp_path)


def test_wrong_flags_are_a_value_error(passes):
    passes(
        """
from hvdlite_launcher import run
try:
    run(print, hosts="localhost:1", np=2)
except ValueError as error:
    assert str(error).startswith("-np 2 is more than the 1 slots"), error
else:
    raise AssertionError
"""
    )


def test_no_secret_is_on_a_command_line(program):
    text = WAITS.replace("np=2", "np=2, environment={'TOKEN': 's3cret-flag'}, kwargs={'token': 's3cret-argument'}")
    job = program(text.replace("def wait():", "def wait(token):"))
    for _ in range(2):
        assert b"waits" in job.process.stdout.readline()
    command_lines = [" ".join(process.cmdline()) for process in job.processes()]
    assert len(command_lines) >= 5  # the caller, the runner, the agent and the workers
    assert "s3cret" not in "".join(command_lines)
    job.process.kill()
    job.assert_gone()


def test_ctrl_c_ends_the_job_and_is_raised(program):
    job = program(WAITS)
    for _ in range(2):
        assert b"waits" in job.process.stdout.readline()
    job.process.send_signal(signal.SIGINT)
    code, out, _ = job.ended(ENDED_S)
    assert (code, out) == (7, b"caught KeyboardInterrupt()\n")
    assert not job.processes()
    assert not job.leftovers()


def test_a_caller_that_is_killed_takes_the_job_with_it(program):
    job = program(WAITS)
    assert b"waits" in job.process.stdout.readline()
    job.process.kill()
    job.assert_gone()


@pytest.mark.night
def test_a_courier_that_is_killed_takes_the_job_with_it_and_is_told(program):
    job = program(WAITS)
    assert b"waits" in job.process.stdout.readline()
    (runner,) = psutil.Process(job.process.pid).children()
    runner.kill()
    code, out, _ = job.ended(ENDED_S)
    assert code == 7
    assert b"caught JobError('the process that ran the job was killed by SIGKILL')" in out
    job.assert_gone()


@pytest.mark.night
def test_a_function_is_called_on_several_hosts_and_one_that_fails_there_is_named(program, make_lan, tmp_path):
    """The hosts see the main program's own directory, but nothing of the call is in it."""
    lan = make_lan("a", "b")
    job = program(
        """
import os
import torch
import hvdlite as hvd

class Lonely(Exception):
    pass

def where(payload):
    hvd.init(timeout_s=60)
    mean = hvd.allreduce(torch.tensor(float(hvd.rank())), name="rank").item()
    return os.uname().nodename, mean, payload[::-1]

def fail():
    hvd.init(timeout_s=60)
    if hvd.rank() == 1:
        raise Lonely(os.uname().nodename)
    hvd.barrier()

payload = os.urandom(20_000_000)
assert hvd.run(where, (payload,), hosts="a,b") == [("a", 0.5, payload[::-1]), ("b", 0.5, payload[::-1])]
try:
    hvd.run(fail, hosts="a,b")
except Lonely as error:
    print(error, error.__cause__)
""",
        on=lan.desk,
    )
    code, out, err = job.ended(300)
    assert code == 0, err.decode()
    assert out.decode().startswith("b \nrank 1 on b:\n")
    wait_until(lambda: lan.left() == [], 5, lambda: str(lan.left()))
