"""
`EndingStore`: a store for gloo whose waits end when one of the ranks ends, or fails to open its part.

    gloo ── wait, get ── EndingStore ── Ends.wait_until_set ── the ranks' store

While gloo connects, it waits in the store for the address of each rank, and only the store can end that. `engine` gives
one to each group that it opens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

WaitUntilSet = Callable[[Store, Sequence[str], timedelta], None]


class EndingStore(Store):
    """Passes everything on to ``store``, and waits by ``wait_until_set``.

    C++ looks its methods up by name, and keeps no reference to the Python object: its maker must, while gloo connects.
    """

    def __init__(self, store: Store, timeout: timedelta, wait_until_set: WaitUntilSet) -> None:
        """``timeout`` is that of `get`, which has none of its own."""
        super().__init__()
        self._store = store
        self._patience = timeout
        self._wait_until_set = wait_until_set

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # torch's stubs lack bytes

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_until_set(self._store, keys, self._patience if timeout is None else timeout)

    def has_extended_api(self) -> bool:
        # Gloo then asks by `get` and `set` alone.
        return False
