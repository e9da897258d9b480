"""
`run` and `HorovodRunner`: call a function in ranks that are tasks of Apache Spark, as `horovod.spark` and `sparkdl` do.

    run ── a barrier job, one task per rank ── each task tells the others its host ── a process of its own
        ── the function calls hvd.init() ── its value, or its error, comes back to the driver

A rank is a process beside Spark's Python worker, since Spark uses that again for other jobs, with all that the function
has left there. The first task serves the store in which ranks find each other. The job's secret comes over Spark's own
messages, so that nobody else can take part.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from .environment import SPARK_START_TIMEOUT
from .errors import CommunicationError
from .values import seconds, shown, whole_number

__all__ = ["HorovodRunner", "run"]

_START_TIMEOUT_S = 600.0
# How long other ranks are given to fail too once one has, so that the error that is raised is the cause.
_CAUSE_S = 5.0
_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


class RankError(RuntimeError):
    """A function that `run` has called in a rank has raised; the message has that rank's traceback."""


@dataclass(frozen=True)
class _Facts:
    """Where a task is, what its host's GPUs are to it, and, of the first task, how ranks find each other."""

    host: str
    gpus: list[str]
    port: int
    secret: str


@dataclass(frozen=True)
class _Outcome:
    """How a rank has ended: with a pickled ``value``, or with an ``error``, which may only follow from another's."""

    rank: int
    value: bytes | None = None
    error: str = ""
    follows: bool = False


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int | None = None,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Calls ``fn(*args, **kwargs)`` in ``num_proc`` ranks, which are tasks of the active SparkContext.

    Returns what ``fn`` returned, by rank. ``num_proc`` is ``spark.default.parallelism`` by default. All ranks begin
    together: Spark needs as many free slots, and a TimeoutError after ``start_timeout`` seconds (600, or
    HVDLITE_SPARK_START_TIMEOUT) says that it has none. ``env`` are variables to set in the ranks; ``executable`` is
    their Python, by default that of Spark's workers. Where ``fn`` raises, the other ranks are ended, and a RankError
    has the traceback of the rank that failed first. Nothing is tried again.

    What ranks print goes where Spark's workers print: arguments that redirect it are refused, as those of MPI are.
    """
    refused = {"use_mpi": use_mpi, "extra_mpi_args": extra_mpi_args, "stdout": stdout, "stderr": stderr}
    refused |= {"prefix_output_with_timestamp": prefix_output_with_timestamp}
    for name, given in refused.items():
        if given:
            way_out = "ranks print where Spark's workers do" if "out" in name or "err" in name else "MPI is not used"
            raise ValueError(f"spark.run({name}={shown(given)}): leave it out: {way_out}")
    context = _active_context()
    size = context.defaultParallelism if num_proc is None else whole_number(num_proc)
    if size is None or size < 1:
        raise ValueError(f"spark.run(num_proc={shown(num_proc)}) is not a whole number from 1 on")
    variables = dict(env or {})
    if nics:
        variables["GLOO_SOCKET_IFNAME"] = variables["NCCL_SOCKET_IFNAME"] = ",".join(
            [nics] if isinstance(nics, str) else nics
        )
    timeout: object = start_timeout
    if timeout is None:
        variable = SPARK_START_TIMEOUT.given_in(os.environ)
        timeout = SPARK_START_TIMEOUT.read(variable) if variable.text else _START_TIMEOUT_S
    call = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    job = _Job(context, size, seconds(timeout, "start_timeout"))
    shim = "hvdlite.horovod" in sys.modules
    return job.run(_Task(call, variables, executable, shim))


class HorovodRunner:
    """Databricks' `sparkdl.HorovodRunner`: runs a function in ``np`` ranks on Spark, or in ``-np`` on this machine.

    ``driver_log_verbosity`` has no effect: ranks print where Spark's workers do.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        number = whole_number(np)
        if number is None:
            raise ValueError(f"HorovodRunner(np={shown(np)}) is not a whole number")
        if driver_log_verbosity not in ("log_callback_only", "all"):
            raise ValueError(
                f"HorovodRunner(driver_log_verbosity={shown(driver_log_verbosity)}): 'log_callback_only' or 'all'"
            )
        self.num_processor = number

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Calls ``main(**kwargs)`` in all ranks, and returns what it returned on rank 0.

        With ``np=0`` there are as many ranks as Spark has slots.
        """
        if self.num_processor < 0:
            from . import run as run_here  # noqa: PLC0415  # not the one of this module

            return run_here(main, kwargs=kwargs, np=-self.num_processor, horovod=True)[0]
        return run(main, kwargs=kwargs, num_proc=self.num_processor or None)[0]


def _active_context() -> Any:
    try:
        context = importlib.import_module("pyspark").SparkContext._active_spark_context
    except ModuleNotFoundError as error:
        raise ImportError("hvdlite.spark needs pyspark, which is not installed: pip install pyspark") from error
    if context is None:
        raise RuntimeError("Could not find an active SparkContext, are you running in a PySpark session?")
    return context


class _Job:
    """The driver's side: a job of Spark, and what its tasks have told of ranks that failed."""

    def __init__(self, context: Any, size: int, start_timeout_s: float) -> None:
        self._context = context
        self._size = size
        self._start_timeout_s = start_timeout_s
        self._group = f"hvdlite-{secrets.token_hex(8)}"

    def run(self, task: _Task) -> list[Any]:
        accumulators = importlib.import_module("pyspark.accumulators")

        class Outcomes(accumulators.AccumulatorParam):  # type: ignore[misc,name-defined]  # imported where Spark is
            def zero(self, value: list[_Outcome]) -> list[_Outcome]:
                return []

            def addInPlace(self, value1: list[_Outcome], value2: list[_Outcome]) -> list[_Outcome]:  # noqa: N802
                return [*value1, *value2]

        # Of each task that has ended, while others still run: Spark sends results alone only when all have.
        outcomes = self._context.accumulator([], Outcomes())
        thread = importlib.import_module("pyspark").InheritableThread(target=self._submit, args=(task, outcomes))
        self._error: BaseException | None = None
        thread.start()
        try:
            self._wait(thread, outcomes)
        finally:
            # In the order in which they came; ranks that are ended now are no cause.
            ended = list(outcomes.value)
            if thread.is_alive():
                self._context.cancelJobGroup(self._group)
                thread.join(_CAUSE_S)
        _raise_first(ended)
        if self._error is not None:
            raise self._error
        return [pickle.loads(each.value) for each in sorted(ended, key=lambda outcome: outcome.rank)]

    def _submit(self, task: _Task, outcomes: Any) -> None:
        def tell(index: int, _: object) -> Iterator[None]:
            outcomes.add([task.run()])
            return iter(())

        self._context.setJobGroup(self._group, "ranks of hvdlite", interruptOnCancel=True)
        try:
            places = self._context.parallelize(range(self._size), self._size).barrier()
            places.mapPartitionsWithIndex(tell).collect()
        except BaseException as error:  # noqa: BLE001  # the waiting thread raises it
            self._error = error

    def _wait(self, thread: Any, outcomes: Any) -> None:
        """Waits for the job's end; raises a TimeoutError if Spark has not begun it in time."""
        deadline: float | None = time.monotonic() + self._start_timeout_s
        fails_at: float | None = None
        while thread.is_alive():
            thread.join(_POLL_S)
            failed = [outcome for outcome in outcomes.value if outcome.value is None]
            if failed and fails_at is None:
                fails_at = time.monotonic() + _CAUSE_S
            if fails_at is not None and time.monotonic() > fails_at:
                return
            stages = self._stages()
            if any(stage.currentAttemptId for stage in stages):
                raise RankError("spark.run(): Spark has lost a task, as its executor has ended: nothing is tried again")
            if any(stage.numActiveTasks + stage.numCompletedTasks for stage in stages):
                deadline = None
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"spark.run(): Spark has not started {self._size} tasks at once within {self._start_timeout_s:g} s "
                    f"(start_timeout=..., or {SPARK_START_TIMEOUT.names[0]}): it has "
                    f"{self._context.defaultParallelism} slots by spark.default.parallelism; give a smaller num_proc, "
                    "or more executors"
                )

    def _stages(self) -> list[Any]:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(self._group)]
        stages = [tracker.getStageInfo(number) for job in jobs if job is not None for number in job.stageIds]
        return [stage for stage in stages if stage is not None]


def _raise_first(outcomes: Sequence[_Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.value is None]
    for outcome in sorted(failed, key=lambda outcome: outcome.follows):
        raise RankError(f"the function that spark.run() called failed on rank {outcome.rank}:\n{outcome.error}")


@dataclass(frozen=True)
class _Task:
    """A task's side: `run` makes the task a rank. ``call`` is the pickled function with its arguments."""

    call: bytes
    variables: dict[str, str]
    executable: str | None
    # Whether ``import horovod`` means hvdlite.
    shim: bool

    def run(self) -> _Outcome:
        context = importlib.import_module("pyspark").BarrierTaskContext.get()
        index: int = context.partitionId()
        try:
            store, secret = None, ""
            if index == 0:
                from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415  # other tasks have no use for torch

                # Of this process, since a port that is open already cannot be lost to another program.
                store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
                secret = secrets.token_hex(32)
            gpus = context.resources().get("gpu")
            own = _Facts(socket.gethostname(), list(gpus.addresses) if gpus else [], store.port if store else 0, secret)
            facts = [_Facts(**json.loads(each)) for each in context.allGather(json.dumps(asdict(own)))]
            address = context.getTaskInfos()[0].address.rpartition(":")[0]
            variables = _variables_of(index, facts, address) | self.variables
            outcome = self._outcome(int(variables["RANK"]), variables)
        except Exception:  # noqa: BLE001  # Spark would try all tasks again
            return _Outcome(index, error=traceback.format_exc())
        if outcome.value is not None:
            # The store must be there until the last rank has left. One that failed tells the driver at once.
            context.barrier()
        return outcome

    def _outcome(self, rank: int, variables: Mapping[str, str]) -> _Outcome:
        reading, writing = os.pipe()
        command = [self.executable or sys.executable, "-m", "hvdlite.spark", str(writing), str(os.getpid())]
        command += ["--horovod"] * self.shim
        with open(reading, "rb") as answers:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(writing,), env={**os.environ, **variables}
            )
            os.close(writing)
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(self.call)
            answer = answers.read()
        code = child.wait()
        if answer:
            outcome: _Outcome = pickle.loads(answer)
            return outcome
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return _Outcome(rank, error=f"its process {how} before the function returned")


def _variables_of(index: int, facts: Sequence[_Facts], address: str) -> dict[str, str]:
    """Returns the variables that make a task's process a rank, as torchrun sets them, and Horovod's beside them.

    Ranks of a host follow each other, in the order of the tasks.
    """
    hosts = list(dict.fromkeys(each.host for each in facts))
    order = sorted(range(len(facts)), key=lambda number: hosts.index(facts[number].host))
    beside = [number for number in order if facts[number].host == facts[index].host]
    local = beside.index(index)
    sizes = [sum(each.host == host for each in facts) for host in hosts]
    across = [host for host, size in zip(hosts, sizes, strict=True) if size > local]
    numbers = {
        "RANK": order.index(index),
        "WORLD_SIZE": len(facts),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": len(beside),
        "GROUP_RANK": hosts.index(facts[index].host),
        "MASTER_PORT": facts[0].port,
        "HOROVOD_RANK": order.index(index),
        "HOROVOD_SIZE": len(facts),
        "HOROVOD_LOCAL_RANK": local,
        "HOROVOD_LOCAL_SIZE": len(beside),
        "HOROVOD_CROSS_RANK": across.index(facts[index].host),
        "HOROVOD_CROSS_SIZE": len(across),
    }
    variables = {name: str(number) for name, number in numbers.items()}
    variables |= {"MASTER_ADDR": address, "TORCHELASTIC_USE_AGENT_STORE": "True", "HVDLITE_SECRET": facts[0].secret}
    variables |= {"HOROVOD_HOSTNAME": facts[index].host, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if facts[index].gpus:
        # All of the host's, first one of each rank, so that cuda:LOCAL_RANK is the rank's own.
        by_turns = zip_longest(*(facts[number].gpus for number in beside))
        gpus = dict.fromkeys(gpu for turn in by_turns for gpu in turn if gpu is not None)
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables


def be_a_rank(answers: int, parent: int) -> None:
    """Calls the function that comes by standard input, and writes its `_Outcome` to the descriptor ``answers``.

    This process is the rank. It ends with its ``parent``, Spark's worker, which Spark kills where a job is cancelled.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl
        sys.exit(1)
    os.set_inheritable(answers, False)
    if "--horovod" in sys.argv:
        importlib.import_module("hvdlite.horovod").install()
    rank = int(os.environ["RANK"])
    try:
        fn, args, kwargs = pickle.loads(sys.stdin.buffer.read())
        outcome = _Outcome(rank, value=cloudpickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001  # whatever the function has raised
        if isinstance(error, SystemExit) and not error.code:
            error = RuntimeError("sys.exit() was called before the function returned")
        follows = isinstance(error, CommunicationError)
        outcome = _Outcome(rank, error="".join(traceback.format_exception(error)), follows=follows)
    with open(answers, "wb") as file:
        pickle.dump(outcome, file)


if __name__ == "__main__":
    # Under its own name, by which the outcome is unpickled.
    importlib.import_module("hvdlite.spark").be_a_rank(int(sys.argv[1]), int(sys.argv[2]))
