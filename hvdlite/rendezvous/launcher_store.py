"""
`LauncherStore`: the store through which ranks find each other, as a `torch.distributed.Store`.

It is hvdlite-run's, or another one that takes the same requests, such as `hvdlite.ray`'s. gloo and NCCL call its
methods from threads of their own. `runtime.connect_ranks` and `round_trips` create it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from hvdlite_wire.store_requests import StoreRequest
from torch._C._distributed_c10d import Store

from .placement import StoreConnection

# Keeps all instances alive: C++ holds only the C++ part of an instance, and fails once Python has collected the
# Python part with the methods. A process makes one for each store, see `process_state`.
_instances: list[LauncherStore] = []

_CHECK_S = 1.0


class LauncherStore(Store):
    """A `torch.distributed.Store` that sends requests to hvdlite-run, or to another store that takes them.

    C++ looks its methods up by name. Errors are torch's: `DistStoreError` (a timeout too) and `DistNetworkError`.
    """

    def __init__(self, client: StoreConnection, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._client = client
        _instances.append(self)

    def clone(self) -> LauncherStore:
        return LauncherStore(self._client, self._timeout())

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(StoreRequest.SET, [key], [key, value])

    def get(self, key: str) -> bytes:
        return self._ask(StoreRequest.GET, [key], [key], self._timeout())[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask(StoreRequest.ADD, [key], [key, str(value)])[0])

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        return self._ask(StoreRequest.COMPARE_SET, [key], [key, expected_value, desired_value])[0]

    def append(self, key: str, value: bytes | str) -> None:
        self._ask(StoreRequest.APPEND, [key], [key, value])

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(StoreRequest.CHECK, keys, keys) == [b"1"]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(StoreRequest.WAIT, keys, keys, self._timeout() if timeout is None else timeout)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(StoreRequest.GET, keys, keys, self._timeout())

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if keys:
            items = [part for item in zip(keys, values, strict=True) for part in item]
            self._ask(StoreRequest.SET, keys, items)

    def delete_key(self, key: str) -> bool:
        return self._ask(StoreRequest.DELETE, [key], [key]) == [b"1"]

    def num_keys(self) -> int:
        return int(self._ask(StoreRequest.COUNT, [], [])[0])

    deleteKey = delete_key  # noqa: N815  # the names that C++ looks up
    getNumKeys = num_keys  # noqa: N815

    def _missing(self, keys: Sequence[str]) -> Sequence[str]:
        try:
            checks = [self._client.request(StoreRequest.CHECK, [key.encode()], _CHECK_S) for key in keys]
        except (OSError, ValueError):
            return keys
        return [key for key, there in zip(keys, checks, strict=True) if there == [b"0"]] or keys

    def _timeout(self) -> timedelta:
        # The C++ part of the store keeps it and may change it.
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        return timeout

    def _ask(
        self,
        operation: StoreRequest,
        keys: Sequence[str],
        parts: Iterable[bytes | str],
        timeout: timedelta | None = None,
    ) -> list[bytes]:
        """Sends a request and returns the answer; raises torch's errors. Without a timeout the store's own applies."""
        patience = self._timeout() if timeout is None else timeout
        timeout_s = patience.total_seconds() or None  # in torch, 0 means no timeout
        raw = [part.encode() if isinstance(part, str) else part for part in parts]
        try:
            return self._client.request(operation, raw, timeout_s)
        except TimeoutError:
            missing = self._missing(keys)
            some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise dist.DistStoreError(
                f"{operation.name.lower()} timed out after {timeout_s:g} s: no answer from the store about {some}"
            ) from None
        except ConnectionError as error:
            raise dist.DistNetworkError(str(error)) from error
        except ValueError as error:
            raise dist.DistStoreError(f"{operation.name.lower()} of {', '.join(keys[:3])}: {error}") from error
