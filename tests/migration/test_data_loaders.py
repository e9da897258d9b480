"""`horovod.data`: loaders whose batches are read ahead by a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hvdlite.horovod.names import AsyncDataLoaderMixin, BaseDataLoader


class Loader(BaseDataLoader):
    def __init__(self, batches: int, fails_at: int | None = None) -> None:
        self.batches = batches
        self.fails_at = fails_at
        self.epochs = 0
        self.read: list[int] = []
        self.is_read = threading.Event()

    def __len__(self) -> int:
        return self.batches

    def _iterate(self) -> Iterator[int]:
        self.epochs += 1
        for batch in range(self.batches):
            if batch == self.fails_at:
                raise OSError("no such file")
            self.read.append(batch)
            self.is_read.set()
            yield batch

    def _process_batch(self, batch: int) -> int:
        return 10 * batch


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    pass


@pytest.fixture
def make():
    made: list[AsyncLoader] = []

    def loader(*args: int | None, **options: int) -> AsyncLoader:
        made.append(AsyncLoader(options.pop("async_loader_queue_size", 2), *args, **options))
        return made[-1]

    yield loader
    for each in made:
        each.close_async_loader()


@pytest.mark.parametrize("queue_size", [0, 1, 2, 64])
def test_each_iteration_has_the_batches_of_an_epoch(make, queue_size):
    loader = make(5, async_loader_queue_size=queue_size)
    assert len(loader) == 5
    for _ in range(3):
        assert list(loader) == [0, 10, 20, 30, 40]
    assert list(Loader(5)) == [0, 10, 20, 30, 40]


def test_nothing_is_read_ahead_before_the_first_iteration_and_then_as_much_as_there_is_room_for(make):
    loader = make(50, async_loader_queue_size=3)
    assert loader.read == []
    iterator = iter(loader)
    assert next(iterator) == 0
    assert loader.is_read.wait(30)
    assert [next(iterator) for _ in range(5)] == [10, 20, 30, 40, 50]
    assert len(loader.read) <= 6 + 3 + 1


def test_an_iteration_that_is_broken_off_goes_on_in_the_next_one(make):
    loader = make(5)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 10]
    assert list(loader) == [20, 30, 40]
    assert list(loader) == [0, 10, 20, 30, 40]


def test_an_error_is_raised_after_the_batches_before_it_and_in_each_later_iteration(make):
    loader = make(5, fails_at=2)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 10]
    with pytest.raises(OSError, match="no such file"):
        next(iterator)
    iterator = iter(loader)
    with pytest.raises(OSError, match="no such file"):
        next(iterator)


@pytest.mark.parametrize("queue_size", [1, 64])
def test_closing_ends_the_thread_also_where_nobody_takes_what_it_has_read(make, queue_size):
    loader = make(3, async_loader_queue_size=queue_size)
    iterator = iter(loader)
    assert next(iterator) == 0
    loader.close_async_loader()
    assert not any(each.name == "hvdlite AsyncDataLoader" for each in threading.enumerate())
    with pytest.raises(RuntimeError, match="has been closed"):
        next(iterator)
    loader.close_async_loader()
