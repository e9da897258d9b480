"""The base classes of `horovod.data`: loaders of batches, and a mix-in whose thread reads batches ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

# How long the thread waits for room before it looks whether it has been closed.
_LOOKS_EACH_S = 0.1


class BaseDataLoader:
    """Iterates over batches. A subclass has ``__len__``, the number of batches, and ``_iterate``."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yields the batches of one epoch."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Returns what the program gets of a batch; called on the thread that iterates."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Calls ``_iterate`` of a loader on a thread, which keeps up to so many batches ready, also of the next epoch.

    To be placed before the loader: ``class AsyncLoader(AsyncDataLoaderMixin, Loader)``. An iteration that is broken off
    goes on in the next one. An exception of ``_iterate`` is raised in the iteration that comes to it, and in all later
    ones. `close_async_loader` ends the thread.
    """

    _process_batch: Any
    _iterate: Any

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        """With ``async_loader_queue_size=0`` nothing is read ahead. All other arguments are the loader's."""
        self.async_loader_queue_size = async_loader_queue_size
        super().__init__(*args, **kwargs)
        self._closing = threading.Event()
        self._ready: queue.Queue[list[Any]] = queue.Queue(max(0, async_loader_queue_size))
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def close_async_loader(self) -> None:
        """Ends the thread, and drops what it has read. It waits for the batch that is being read."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="hvdlite AsyncDataLoader", daemon=True)
            self._thread.start()
        # A list of one batch, or an empty one at the end of an epoch.
        while batches := self._next():
            yield self._process_batch(*batches)

    def _next(self) -> list[Any]:
        assert self._thread is not None, "it has been started"
        while not self._closing.is_set():
            was_alive = self._thread.is_alive()
            try:
                return self._ready.get(timeout=_LOOKS_EACH_S)
            except queue.Empty:
                if not was_alive and self._error is not None:
                    raise self._error from None
        raise RuntimeError("this loader has been closed by close_async_loader()")

    def _read(self) -> None:
        try:
            while not self._closing.is_set():
                for batch in self._iterate():
                    if not self._put([batch]):
                        return
                if not self._put([]):
                    return
        except BaseException as error:  # noqa: BLE001 - whatever the program's loader raises; the program gets it
            self._error = error

    def _put(self, batches: list[Any]) -> bool:
        """Returns False if the loader has been closed meanwhile."""
        while not self._closing.is_set():
            try:
                self._ready.put(batches, timeout=_LOOKS_EACH_S)
            except queue.Full:
                continue
            return True
        return False
