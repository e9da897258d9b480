"""Calls a function in many workers: `run`, in the process of its caller.

    run ── FunctionCall ────► function_runner ── store ──► hvdlite.worker.functions, in every worker
        ◄── FunctionResults ──                 ◄── store ──

It pickles the function, starts a `function_runner` process that runs the job, and unpickles the results: what the
function returned in each worker, or the exception of the worker that failed first. The bytes in both messages are
unpickled only here and in workers.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn, TypeVar

from ..errors import JobError, UsageError
from ..system.process_tree import signal_name, with_absolute_python_path
from ..system.terminal_text import one_line, visible
from .flag_parser import Parser, Value, closest

# These flags start no job, so nothing would be returned.
_NO_ARGUMENTS = frozenset({"dry-run", "cb", "check", "check-build", "ps", "report", "diagnose", "help", "version"})

# One of these says how many workers there are.
_NUMBERS_OF_WORKERS = (
    *("np", "n", "num_proc", "hosts", "hostfile", "config_file"),
    *("min_np", "min_num_proc", "host_discovery_script"),
)

_RUNNER = ("-m", "hvdlite_launcher.cli.function_runner")

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class FunctionCall:
    """A function call in a working directory; ``flags`` are hvdlite-run's."""

    flags: tuple[str, ...]
    cwd: str
    call: bytes


@dataclass(frozen=True)
class FunctionResults:
    """The end of the job, with a ``message`` about the cause; ``rank`` is the worker that failed first, if one did.

    ``returns`` has a result by worker, except for those that died before the function was done.
    """

    exit_code: int
    message: str = ""
    rank: int | None = None
    returns: Mapping[int, bytes] = field(default_factory=dict)


class RemoteTraceback(Exception):  # noqa: N818  # shown by this name, as in concurrent.futures
    """The traceback of a worker's exception, as text: the ``__cause__`` of the exception that `run` raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return self._text


def run(
    func: Callable[..., Returned], args: Sequence[Any], kwargs: Mapping[str, Any] | None, flags: Mapping[str, object]
) -> list[Returned]:
    """See `hvdlite_launcher.run`."""
    if not callable(func):
        raise TypeError(f"run() needs a function, not {_shown(func)}")
    if not isinstance(args, Iterable) or isinstance(args, str | bytes | Mapping):
        raise TypeError(f"run(): args must be a sequence of arguments, such as ({_shown(args)},), not {_shown(args)}")
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        raise TypeError(f"run(): kwargs must be a mapping from names to arguments, not {_shown(kwargs)}")
    words = tuple(_words(flags))
    if all(flags.get(name) is None for name in _NUMBERS_OF_WORKERS):
        raise ValueError("run(): the number of workers is missing: give np, hosts or hostfile, such as np=4")
    return _returned(_results_of(FunctionCall(words, os.getcwd(), _pickled_call(func, args, kwargs or {}))))


def _words(flags: Mapping[str, object]) -> Iterator[str]:
    parser = Parser()
    known = {key.replace("-", "_"): flag for key, flag in parser.flags_by_key().items() if key not in _NO_ARGUMENTS}
    given: dict[str, str] = {}  # the argument's name by the flag's dest, since a flag may have several names
    for name, value in flags.items():
        if name not in known:
            raise TypeError(f"run() has no argument {name!r}; {closest(name, known)}")
        if value is None:
            continue
        if (other := given.setdefault(known[name].dest, name)) != name:
            raise TypeError(f"run(): {other} and {name} are the same argument: give only one of them")
        try:
            yield from parser.words_for(known[name], _as_value(value))
        except (UsageError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None


def _as_value(value: object) -> Value:
    if isinstance(value, Mapping):
        return {_as_text(name): None if each is None else _as_text(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(each) for each in value]
    return _as_text(value)


def _as_text(value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) or hasattr(value, "__index__") or hasattr(value, "__float__"):
        return str(value)
    raise UsageError(f"it must be a str or a number, not {_shown(value)}")


def _shown(value: object) -> str:
    return one_line(repr(value)[:200])


def _pickled_call(func: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        pickled = _dumps((func, tuple(args), dict(kwargs)))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise pickle.PicklingError(f"func, args or kwargs cannot be pickled for the workers: {reason}") from error
    # Modules that are pickled by name must be found there by the same paths as here.
    return pickle.dumps(([os.path.abspath(entry) for entry in sys.path], pickled))


def _dumps(value: object) -> bytes:
    # pickle alone cannot pickle functions without a name, or those defined in a notebook or the main program.
    import cloudpickle  # type: ignore[import-untyped]  # noqa: PLC0415  # it has no types, and is used only here

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # as above
        dispatch_table = ChainMap(
            {CodeType: lambda code: _with_filename(code, *cloudpickle.Pickler.dispatch_table[CodeType](code))},
            cloudpickle.Pickler.dispatch_table,
        )

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _with_filename(code: CodeType, make: object, args: tuple[object, ...]) -> tuple[object, tuple[object, ...]]:
    """Returns cloudpickle's way to make a code object again, with its file, which tracebacks need for their lines.

    cloudpickle 3.1.3 leaves the file out.
    """
    return make, tuple(code.co_filename if each == "<dynamic-code>" else each for each in args)


def _results_of(call: FunctionCall) -> FunctionResults:
    """Runs the call in a runner process and returns its results; ends the job if this is interrupted."""
    for stream in (sys.stdout, sys.stderr):  # earlier output must appear first
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as deliveries:
        try:
            runner = _start_runner(write_end)
        finally:
            os.close(write_end)
        try:
            _send(call, runner)
            delivered = deliveries.read()
            runner.wait()
        except BaseException:
            _end(runner)
            raise
    _hang_up(runner)
    if not delivered:
        code = runner.returncode
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        raise JobError(f"the process that ran the job {how}")
    results = pickle.loads(delivered)
    assert isinstance(results, FunctionResults)
    return results


def _start_runner(results: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *_RUNNER, str(results)],
        stdin=subprocess.PIPE,
        bufsize=0,
        pass_fds=(results,),
        # The user's working directory must not be on its sys.path: it may contain a queue.py.
        cwd="/",
        env=with_absolute_python_path(),
        # Ctrl-C on the terminal must reach only the caller, which then hangs up.
        start_new_session=True,
    )


def _send(call: FunctionCall, runner: subprocess.Popen[bytes]) -> None:
    assert runner.stdin is not None
    rest = memoryview(pickle.dumps(call))
    with contextlib.suppress(BrokenPipeError):  # if it has ended, its missing results say so
        while rest:
            rest = rest[runner.stdin.write(rest) :]


def _hang_up(runner: subprocess.Popen[bytes]) -> None:
    assert runner.stdin is not None
    runner.stdin.close()


def _end(runner: subprocess.Popen[bytes]) -> None:
    """Hangs up and waits until no process of the job is left; each Ctrl-C speeds that up."""
    _hang_up(runner)
    while runner.returncode is None:
        try:
            runner.wait()
        except KeyboardInterrupt:
            runner.terminate()


def _returned(results: FunctionResults) -> list[Any]:
    """Returns what the function returned, by rank; raises an exception if the job failed."""
    returned = [pickle.loads(data) for data in results.returns.values()]
    # In an elastic job, those of workers that were in the last world: others have left, or were replaced.
    last = max((each["generation"] or 0 for each in returned), default=0)
    returns = {each["rank"]: each for each in returned if each["generation"] in (None, last) and each["size"]}
    if returned and not returns:
        if error := next((each for each in returned if each["value"] is None), None):
            _raise_again("a worker", **error)
        raise JobError("the function of an elastic job must call hvd.init(): without it workers have no ranks")
    raised = [rank for rank in sorted(returns) if returns[rank]["value"] is None]
    first = results.rank if results.exit_code else next(iter(raised), None)
    if first in raised:
        _raise_again(f"rank {first}", **returns[first])
    if results.exit_code == UsageError.exit_code and first is None:
        raise ValueError(visible(results.message))
    if results.exit_code:
        # Only a signal to the runner ends a job without a message.
        raise JobError(visible(results.message) or f"the job was ended by {signal_name(results.exit_code - 128)}")
    size = max((each["size"] for each in returns.values()), default=1)
    for rank in range(size):
        if rank not in returns:
            raise JobError(f"rank {rank} ended with exit code 0 before the function returned")
    return [_unpickled(rank, returns[rank]["value"]) for rank in range(size)]


def _unpickled(rank: int, value: bytes) -> object:
    try:
        return pickle.loads(value)
    except Exception as error:
        raise JobError(
            f"the value that rank {rank} returned cannot be unpickled here: "
            f"{type(error).__name__}: {visible(str(error))}"
        ) from error


def _raise_again(who: str, *, host: str, error: bytes | None, summary: str, traceback: str, **_: object) -> NoReturn:
    # Text of a worker, whose control characters must not reach the caller's terminal.
    cause = RemoteTraceback(f'\n{who} on {host}:\n"""\n{visible(traceback)}"""')
    try:
        exception = pickle.loads(error or b"")
    except Exception:  # noqa: BLE001  # its class may need other arguments, or not exist here
        exception = None
    if not isinstance(exception, Exception):
        exception = JobError(f"{who} on {host} raised {visible(summary)}")
    shown = tuple(visible(each) if isinstance(each, str) else each for each in exception.args)
    if shown != exception.args:
        exception.args = shown
    raise exception from cause
