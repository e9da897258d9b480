"""
`Request`: an operation that this rank has called. `Executor`: the thread that runs those that all ranks have called.

    rank 0's message "go" ──► Executor.put ──► queue ──► the thread runs the operation ──► its Handle has the result

`requests` puts in what rank 0 answers, and the votes by which ranks agree through shared memory. `joins` puts in what
this rank, having joined, takes part in with zeros.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..calls.handle import Handle
from ..calls.operation import Execution, Run
from ..comm.group import Group
from ..comm.recorder import OPERATIONS, Recorder

Name = tuple[int, str, str]  # the process set's id, the kind's name, the user's name


@dataclass(frozen=True, slots=True)
class Request:
    """An operation that this rank takes part in, on ``group``; ``name`` is its key among the names in use, if any."""

    handle: Handle
    run: Run
    group: Group
    name: Name | None = None
    since_ns: int = field(default_factory=time.monotonic_ns)

    def carry_out(
        self, owns: list[Any], divisor: int, recorder: Recorder, note_end: Callable[[], None] = lambda: None
    ) -> None:
        """Runs the operation on the current thread; ``note_end`` is called before threads that wait for it continue."""
        group, execution = self.group, Execution(self.group, self.handle.what, owns, divisor)
        self.end_with(lambda: group.ends.run(group.label, partial(self.run, execution)), recorder, note_end)

    def end_with(
        self, make: Callable[[], Any], recorder: Recorder, note_end: Callable[[], None] = lambda: None
    ) -> None:
        """Calls ``make`` on the current thread; what it returns or raises becomes the handle's."""
        what = self.handle.what
        if recorder.is_on:
            recorder.note_waiting(what, self.since_ns, time.monotonic_ns())
        try:
            with recorder.span(OPERATIONS, what) if recorder.is_on else nullcontext():
                result = make()
        except BaseException as error:  # noqa: BLE001 - raised by threads that wait for the handle
            note_end()
            self.handle.fail(error)
        else:
            # Only after the span is closed: the waiting thread may stop the timeline next.
            note_end()
            self.handle.succeed(result)


class Executor:
    """Runs what is put in, in this order, on its own thread."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The running operation, and when it began (`time.monotonic`).
        self.current: tuple[str, float] | None = None
        # How many operations have been put in, and how many have ended.
        self.begun = 0
        self.ended = 0
        # Whether it makes the result of a direct call, which rank 0 does not count.
        self.is_making_result = False
        self._refusal: Callable[[str], BaseException] | None = None
        self._thread = threading.Thread(target=self._run, name="hvdlite-operations", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    @property
    def is_idle(self) -> bool:
        """Whether all operations that were put in have ended, and no result is being made."""
        return self.begun == self.ended and not self.is_making_result

    def put(self, request: Request, owns: list[Any], divisor: int) -> None:
        self.begun += 1
        self._queue.put(partial(self.carry_out, request, owns, divisor))

    def put_call(self, call: Callable[[], None]) -> None:
        """Calls a quick function after everything that was put in before; it does not count as an operation."""
        self._queue.put(call)

    def carry_out(self, request: Request, owns: list[Any], divisor: int) -> None:
        """Runs an operation at once, on the executor's own thread: a function from `put_call` may end with this."""
        what = request.handle.what
        if self._refusal is not None:
            self._note_end()
            request.handle.fail(self._refusal(what))
        else:
            self.current = (what, time.monotonic())
            request.carry_out(owns, divisor, self.recorder, self._note_end)

    def finish(self) -> None:
        self._queue.put(None)

    def give_up(self, refusal: Callable[[str], BaseException]) -> None:
        """Ends the thread after the running operation; the remaining ones fail with ``refusal(what)``."""
        self._refusal = refusal
        self._queue.put(None)

    def wait_for_end(self, timeout_s: float) -> None:
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            item()
            # No reference is kept until the next item, since it would keep the caller's tensors alive.
            del item

    def note_result(self) -> None:
        self.is_making_result = False

    def _note_end(self) -> None:
        self.current = None
        self.ended += 1
