"""
The store through which Ray's workers find each other as ranks: an actor, and each worker's connection to it.

    LauncherStore ── RayStore.request ── Ray's own messages ── StoreActor, which keeps keys and values

Requests are those of hvdlite-run's store (`rendezvous.store_client.StoreRequest`). Who may use Ray's cluster may read
and change what is in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from hvdlite_wire.store_requests import StoreRequest

from .ray_package import import_ray

_ray = import_ray("ray")
_errors = import_ray("ray.exceptions")

# Requests that wait, from several threads of each rank.
_MOST_AT_ONCE = 10_000


class StoreActor:
    """Keys and values. Ray runs the methods as coroutines of one thread."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._changed = asyncio.Condition()

    async def request(self, operation: int, parts: list[bytes], timeout_s: float | None) -> list[bytes] | None:
        """Returns the answer to a request; None if keys were not set within ``timeout_s``."""
        async with self._changed:
            if operation in (StoreRequest.GET, StoreRequest.WAIT):
                try:
                    await asyncio.wait_for(self._changed.wait_for(lambda: self._has(parts)), timeout_s)
                except asyncio.TimeoutError:
                    return None
            answer = self._answer(operation, parts)
            self._changed.notify_all()
        return answer

    def _has(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def _answer(self, operation: int, parts: list[bytes]) -> list[bytes]:  # noqa: PLR0911  # one for each request
        values = self._values
        match StoreRequest(operation), parts:
            case StoreRequest.SET, _:
                values.update(zip(parts[::2], parts[1::2], strict=True))
                return []
            case StoreRequest.GET, _:
                return [values[key] for key in parts]
            case StoreRequest.WAIT, _:
                return []
            case StoreRequest.CHECK, _:
                return [b"%d" % self._has(parts)]
            case StoreRequest.ADD, [key, amount]:
                values[key] = b"%d" % (int(values.get(key, b"0")) + int(amount))
                return [values[key]]
            case StoreRequest.COMPARE_SET, [key, expected, desired]:
                # As in torch's stores: a key that is not set counts as empty, and the caller gets its own value back.
                if values.get(key, b"") == expected:
                    values[key] = desired
                return [values.get(key, expected)]
            case StoreRequest.APPEND, [key, tail]:
                values[key] = values.get(key, b"") + tail
                return []
            case StoreRequest.DELETE, [key]:
                return [b"%d" % (values.pop(key, None) is not None)]
            case StoreRequest.COUNT, []:
                return [b"%d" % len(values)]
        raise ValueError(f"the store has no operation {operation} with {len(parts)} arguments")


def start_store() -> Any:
    """Starts a `StoreActor`, and returns its handle. It ends when no process has the handle any more."""
    return _ray.remote(StoreActor).options(num_cpus=0, max_concurrency=_MOST_AT_ONCE).remote()


class RayStore:
    """A worker's connection to the `StoreActor`: a `rendezvous.placement.StoreConnection`. Any thread may use it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def request(
        self, operation: StoreRequest, parts: Iterable[bytes] = (), timeout_s: float | None = None
    ) -> list[bytes]:
        try:
            answer: list[bytes] | None = _ray.get(self._actor.request.remote(int(operation), list(parts), timeout_s))
        except _errors.RayActorError as error:
            raise ConnectionError(
                "the Ray actor with the job's store has ended, because the program that made the ranks has, or its "
                f"node was lost ({str(error).splitlines()[0]})"
            ) from error
        if answer is None:
            raise TimeoutError("no answer in time")
        return answer

    def close(self) -> None:
        return
