"""
The thread that carries out operations that all ranks have agreed on, in the order of rank 0's answers.

    go ── put ── (a queue) ── carried out ── handle

It may be blocked in an operation for as long as another rank is; whoever listens to rank 0 is another thread, and goes
on hearing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from ..comm.recorder import OPERATIONS, Recorder
from .handle import Handle
from .operation import Execution, Run


@dataclass(frozen=True, slots=True)
class Agreed:
    """An operation that is to be carried out now."""

    handle: Handle
    run: Run
    execution: Execution
    since_ns: int = field(default_factory=time.monotonic_ns)

    def carry_out(self, recorder: Recorder, note_end: Callable[[], None] = lambda: None) -> None:
        """Do it in this thread; what it comes to, or what goes wrong, is the handle's.

        ``note_end`` is called when it is over, before whoever waits goes on.
        """
        execution = self.execution
        if recorder.is_on:
            recorder.note_waiting(execution.what, self.since_ns, time.monotonic_ns())
        try:
            with recorder.span(OPERATIONS, execution.what):
                result = self.run(execution)
        except BaseException as error:  # noqa: BLE001 - it is raised by whoever waits for the handle
            note_end()
            self.handle.fail(error)
        else:
            # Only now: whoever waits may end the timeline next.
            note_end()
            self.handle.succeed(result)


class Executor:
    """Carries out what is put in, in this order, on a thread of its own."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._queue: SimpleQueue[Agreed | Callable[[], None] | None] = SimpleQueue()
        # The operation that is being carried out, and since when (`time.monotonic`).
        self.current: tuple[str, float] | None = None
        # How many operations have been put in, and how many are over.
        self.begun = 0
        self.ended = 0
        self._refusal: Callable[[str], BaseException] | None = None
        self._thread = threading.Thread(target=self._run, name="hvdlite-operations", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ident(self) -> int | None:
        """The thread's, once it has been started."""
        return self._thread.ident

    @property
    def is_idle(self) -> bool:
        """Whether all operations that were put in are over."""
        return self.begun == self.ended

    def put(self, operation: Agreed) -> None:
        """Have it carried out after all that was put in before."""
        self.begun += 1
        self._queue.put(operation)

    def put_word(self, tell: Callable[[], None]) -> None:
        """Have something quick called after all that was put in before; it is no operation."""
        self._queue.put(tell)

    def carry_out(self, operation: Agreed) -> None:
        """Carry it out at once: to be called in the thread itself, by something quick that was put in."""
        self._carry_out(operation)

    def finish(self) -> None:
        """End once all that was put in is done."""
        self._queue.put(None)

    def give_up(self, refusal: Callable[[str], BaseException]) -> None:
        """End after the operation under way; the others fail with ``refusal(what)``."""
        self._refusal = refusal
        self._queue.put(None)

    def ended_within(self, timeout_s: float) -> bool:
        """Wait for the thread's end, for so long; whether it has come. At once where it is the caller."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            # Nothing is kept until the next one comes: it would hold the caller's tensors.
            item = self._queue.get()
            if item is None:
                return
            self._do(item)
            del item

    def _do(self, item: Agreed | Callable[[], None]) -> None:
        if not isinstance(item, Agreed):
            item()
            return
        self._carry_out(item)

    def _carry_out(self, operation: Agreed) -> None:
        if self._refusal is not None:
            self._note_end()
            operation.handle.fail(self._refusal(operation.handle.what))
        else:
            self.current = (operation.execution.what, time.monotonic())
            operation.carry_out(self._recorder, self._note_end)

    def _note_end(self) -> None:
        self.current = None
        self.ended += 1
