"""
hvdlite-run's store as a `torch.distributed.Store`, through which gloo and NCCL find the other ranks.

C++ calls these methods from threads of its own. How an answer is got is in `store_client`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .store_client import StoreClient, StoreCommand

# C++ knows only the half of an instance that is its own, and finds no methods once the other half is collected:
# an instance that it has been given must not be. There are a few for each init().
_instances: list[LauncherStore] = []

_CHECK_S = 1.0


class LauncherStore(Store):
    """A `torch.distributed.Store` that asks hvdlite-run; its methods have the names by which C++ looks them up."""

    def __init__(self, client: StoreClient, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._client = client
        _instances.append(self)

    def clone(self) -> LauncherStore:
        return LauncherStore(self._client, self._timeout())

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(StoreCommand.SET, [key], [key, value])

    def get(self, key: str) -> bytes:
        return self._ask(StoreCommand.GET, [key], [key], self._timeout())[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask(StoreCommand.ADD, [key], [key, str(value)])[0])

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        return self._ask(StoreCommand.COMPARE_SET, [key], [key, expected_value, desired_value])[0]

    def append(self, key: str, value: bytes | str) -> None:
        self._ask(StoreCommand.APPEND, [key], [key, value])

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(StoreCommand.CHECK, keys, keys) == [b"1"]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(StoreCommand.WAIT, keys, keys, self._timeout() if timeout is None else timeout)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(StoreCommand.GET, keys, keys, self._timeout())

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if keys:
            items = [part for item in zip(keys, values, strict=True) for part in item]
            self._ask(StoreCommand.SET, keys, items)

    def delete_key(self, key: str) -> bool:
        return self._ask(StoreCommand.DELETE, [key], [key]) == [b"1"]

    def num_keys(self) -> int:
        return int(self._ask(StoreCommand.COUNT, [], [])[0])

    deleteKey = delete_key  # noqa: N815  # C++'s names for them
    getNumKeys = num_keys  # noqa: N815

    def _missing(self, keys: Sequence[str]) -> Sequence[str]:
        """Those of ``keys`` that are not there; all, if that cannot be found out."""
        try:
            checks = [self._client.request(StoreCommand.CHECK, [key.encode()], _CHECK_S) for key in keys]
        except (OSError, ValueError):
            return keys
        return [key for key, there in zip(keys, checks, strict=True) if there == [b"0"]] or keys

    def _timeout(self) -> timedelta:
        """C++ has it, and changes it."""
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
        return timeout

    def _ask(
        self,
        operation: StoreCommand,
        keys: Sequence[str],
        parts: Iterable[bytes | str],
        timeout: timedelta | None = None,
    ) -> list[bytes]:
        """Without ``timeout``, what does not wait for other ranks, and takes as long as a store does."""
        patience = self._timeout() if timeout is None else timeout
        timeout_s = patience.total_seconds() or None  # 0: torch's way of saying that there is none
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
