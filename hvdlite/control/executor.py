"""
`Executor`: the thread that runs operations which all ranks have agreed on, in the order that rank 0 has sent.

    rank 0's message "go" ──► Executor.put ──► queue ──► the thread runs the operation ──► its Handle has the result

`control_client` puts in what rank 0's messages say. `joins` puts in the operations in which this rank, having joined
(Horovod's `join`), takes part with zeros, and `submission` the votes by which ranks agree through shared memory. While
the thread is blocked in an operation because another rank is late, the thread of `rank0_connection` goes on receiving
messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from ..calls.handle import Handle
from ..calls.operation import Execution, Run
from ..comm.recorder import OPERATIONS, Recorder


@dataclass(frozen=True, slots=True)
class Agreed:
    """An operation that all ranks have agreed to run."""

    handle: Handle
    run: Run
    execution: Execution
    since_ns: int = field(default_factory=time.monotonic_ns)

    def carry_out(self, recorder: Recorder, note_end: Callable[[], None] = lambda: None) -> None:
        """Runs the operation on the current thread; its result or error becomes the handle's.

        ``note_end`` is called when it has ended, before threads that wait for the handle continue.
        """
        execution = self.execution
        if recorder.is_on:
            recorder.note_waiting(execution.what, self.since_ns, time.monotonic_ns())
        try:
            with recorder.span(OPERATIONS, execution.what) if recorder.is_on else nullcontext():
                result = execution.group.ends.run(execution.group.label, partial(self.run, execution))
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
        self._recorder = recorder
        self._queue: SimpleQueue[Agreed | Callable[[], None] | None] = SimpleQueue()
        # The running operation, and when it began (`time.monotonic`).
        self.current: tuple[str, float] | None = None
        # How many operations have been put in, and how many have ended.
        self.begun = 0
        self.ended = 0
        self._refusal: Callable[[str], BaseException] | None = None
        self._thread = threading.Thread(target=self._run, name="hvdlite-operations", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ident(self) -> int | None:
        """The thread's ident; None until it is started."""
        return self._thread.ident

    @property
    def is_idle(self) -> bool:
        """Whether all operations that were put in have ended."""
        return self.begun == self.ended

    def put(self, operation: Agreed) -> None:
        """Runs the operation after everything that was put in before."""
        self.begun += 1
        self._queue.put(operation)

    def put_call(self, call: Callable[[], None]) -> None:
        """Calls a quick function after everything that was put in before; it is not counted as an operation."""
        self._queue.put(call)

    def carry_out(self, operation: Agreed) -> None:
        """Runs an operation at once, on the executor's own thread: a function from `put_call` may end with this."""
        if self._refusal is not None:
            self._note_end()
            operation.handle.fail(self._refusal(operation.handle.what))
        else:
            self.current = (operation.execution.what, time.monotonic())
            operation.carry_out(self._recorder, self._note_end)

    def finish(self) -> None:
        """Ends the thread once everything that was put in is done."""
        self._queue.put(None)

    def give_up(self, refusal: Callable[[str], BaseException]) -> None:
        """Ends the thread after the running operation; the remaining ones fail with ``refusal(what)``."""
        self._refusal = refusal
        self._queue.put(None)

    def ended_within(self, timeout_s: float) -> bool:
        """Waits at most this time for the thread's end, except on the thread itself; returns whether it has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            # No reference is kept until the next item, since it would keep the caller's tensors alive.
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, Agreed):
                self.carry_out(item)
            else:
                item()
            del item

    def _note_end(self) -> None:
        self.current = None
        self.ended += 1
