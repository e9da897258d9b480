"""Calls a function in many workers: `run`, in the process of its caller.

It pickles the function, starts a `function_runner` process that runs the job, and unpickles what comes back: what the
function returned in each worker, or the exception of the worker that failed first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from ..cli.flag_parser import TEXTS, Parser, Value, closest
from ..errors import JobError, UsageError
from ..system.signals import signal_name
from ..system.terminal_text import one_line, visible
from .function_messages import FunctionCall, FunctionResults

# They start nothing that could return.
_NO_ARGUMENTS = frozenset({"dry-run", "cb", "check", "check-build", "help", "version"})

Returned = TypeVar("Returned")


class RemoteTraceback(Exception):  # noqa: N818  # named as it is shown, as in concurrent.futures
    """Where in a worker its exception came from: the ``__cause__`` of what `run` raises."""

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
        raise TypeError(f"run() calls a function, and {_shown(func)} is none")
    if not isinstance(args, Iterable) or isinstance(args, str | bytes | Mapping):
        raise TypeError(f"run(): args={_shown(args)} is no sequence of arguments, such as ({_shown(args)},)")
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        raise TypeError(f"run(): kwargs={_shown(kwargs)} is no mapping from names to arguments")
    words = tuple(_words(flags))
    if all(flags.get(name) is None for name in ("np", "n", "num_proc", "hosts", "hostfile", "config_file")):
        raise ValueError("how many workers? Give run() np, hosts or hostfile, such as np=4")
    call = FunctionCall(
        flags=words,
        cwd=os.getcwd(),
        call=_pickled_call(func, args, kwargs or {}),
    )
    return _returned(_results_of(call))


def _words(flags: Mapping[str, object]) -> Iterator[str]:
    parser = Parser()
    known = {key.replace("-", "_"): flag for key, flag in parser.flags_by_key().items() if key not in _NO_ARGUMENTS}
    given: dict[str, str] = {}  # the argument's name by the flag's, which may have several
    for name, value in flags.items():
        if name not in known:
            raise TypeError(f"run() has no argument {name!r}; {closest(name, known)}")
        if value is None:
            continue
        if (other := given.setdefault(known[name].dest, name)) != name:
            raise TypeError(f"run(): {other} and {name} say the same; give one of them")
        try:
            yield from parser.words_for(known[name], _as_value(known[name].dest, value))
        except UsageError as error:
            raise ValueError(f"{name}: {error}") from None


def _as_value(dest: str, value: object) -> Value:
    if isinstance(value, Mapping):
        return {_as_text("hosts", name): None if each is None else _as_text(dest, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(dest, each) for each in value]
    return _as_text(dest, value)


def _as_text(dest: str, value: object) -> str:
    """What would stand on the command line; a `UsageError` where nobody would write that there."""
    is_number = dest not in TEXTS and (hasattr(value, "__index__") or hasattr(value, "__float__"))
    try:
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else str(value) if is_number else None
        # A NUL ends what programs are told, and half of a pair of surrogates is no character.
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return text
    except Exception:  # noqa: BLE001  # by an object's own method, or of a number of thousands of digits
        pass
    kind = "a str" if dest in TEXTS else "a str or a number"
    raise UsageError(f"{_shown(value)} is not {kind} that can be said there")


def _shown(value: object) -> str:
    try:
        return one_line(repr(value)[:200])
    except Exception:  # noqa: BLE001  # whatever an object's own method raises
        return f"<{type(value).__name__}>"


def _pickled_call(func: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    # pickle alone cannot send what has no name, or is defined in a notebook or the main program.
    import cloudpickle  # type: ignore[import-untyped]  # noqa: PLC0415  # it has none; its one use here

    call = (func, tuple(args), dict(kwargs))
    try:
        pickled = cloudpickle.dumps(call)
    except Exception as error:
        culprit = next((what for what, part in zip(("func", "args"), call, strict=False) if not _fits(part)), "kwargs")
        reason = " ".join(str(error).split()) or type(error).__name__
        raise pickle.PicklingError(f"{culprit} cannot be pickled, to be sent to the workers: {reason}") from error
    # What is sent by name is to be found there as it is here.
    return pickle.dumps(([os.path.abspath(entry) for entry in sys.path], pickled))


def _fits(part: object) -> bool:
    import cloudpickle  # noqa: PLC0415  # as above

    try:
        cloudpickle.dumps(part)
    except Exception:  # noqa: BLE001  # anything may be raised by an object's own way of being pickled
        return False
    return True


def _results_of(call: FunctionCall) -> FunctionResults:
    """Have the call carried out, or, where that is interrupted, ended."""
    for stream in (sys.stdout, sys.stderr):  # what was printed before shall be shown before
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
    environment = dict(os.environ)
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return subprocess.Popen(
        [sys.executable, "-m", "hvdlite_launcher.function.function_runner", str(results)],
        stdin=subprocess.PIPE,
        bufsize=0,
        pass_fds=(results,),
        # The user's directory must not be on its sys.path: it may hold a queue.py.
        cwd="/",
        env=environment,
        # Ctrl-C on the terminal is for the caller, who then hangs up.
        start_new_session=True,
    )


def _send(call: FunctionCall, runner: subprocess.Popen[bytes]) -> None:
    assert runner.stdin is not None
    rest = memoryview(pickle.dumps(call))
    with contextlib.suppress(BrokenPipeError):  # how it ended is told by what it delivers, or does not
        while rest:
            rest = rest[runner.stdin.write(rest) :]


def _hang_up(runner: subprocess.Popen[bytes]) -> None:
    assert runner.stdin is not None
    runner.stdin.close()


def _end(runner: subprocess.Popen[bytes]) -> None:
    """Wait until nothing of the job is left; each Ctrl-C meanwhile hurries it."""
    _hang_up(runner)
    while runner.returncode is None:
        try:
            runner.wait()
        except KeyboardInterrupt:
            runner.terminate()


def _returned(results: FunctionResults) -> list[Any]:
    """What the function returned, by rank; or raise what came of it instead."""
    returns = {rank: pickle.loads(data) for rank, data in results.returns.items()}
    raised = [rank for rank in sorted(returns) if returns[rank]["value"] is None]
    first = results.rank if results.exit_code else next(iter(raised), None)
    if first in raised:
        _raise_again(first, **returns[first])
    if results.exit_code == UsageError.exit_code and first is None:
        raise ValueError(visible(results.message))
    if results.exit_code:
        # Only a signal to the runner ends a job without a word.
        raise JobError(visible(results.message) or f"the job was ended by {signal_name(results.exit_code - 128)}")
    size = max((each["size"] for each in returns.values()), default=1)
    for rank in range(size):
        if rank not in returns:
            raise JobError(f"rank {rank} ended with exit code 0, but before the function returned")
    return [_unpickled(rank, returns[rank]["value"]) for rank in range(size)]


def _unpickled(rank: int, value: bytes) -> object:
    try:
        return pickle.loads(value)
    except Exception as error:
        raise JobError(
            f"what rank {rank} returned cannot be unpickled here: {type(error).__name__}: {visible(str(error))}"
        ) from error


def _raise_again(rank: int, *, host: str, error: bytes | None, summary: str, traceback: str, **_: object) -> NoReturn:
    # A worker's words, which the caller's terminal is to show and not to obey.
    cause = RemoteTraceback(f'\nrank {rank} on {host}:\n"""\n{visible(traceback)}"""')
    try:
        exception = pickle.loads(error or b"")
    except Exception:  # noqa: BLE001  # its class may need other arguments, or not be there
        exception = None
    if not isinstance(exception, Exception):
        exception = JobError(f"rank {rank} on {host} raised {visible(summary)}")
    shown = tuple(visible(each) if isinstance(each, str) else each for each in exception.args)
    if shown != exception.args:
        exception.args = shown
    raise exception from cause
