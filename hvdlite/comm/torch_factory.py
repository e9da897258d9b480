"""
The factory that opens a `TorchEngine`: on the default process group, and on further ones over gloo and NCCL.

`runtime.connect_ranks` opens the default process group. Further ones connect through the store of hvdlite's own ranks,
by `gloo`, which proves that each connection is one to a rank of this job.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..errors import CommunicationError, lack_of
from .engine import Engine, EngineFactory, SingleRankFactory
from .gloo import ConnectingRanks, make_gloo, open_proven, wait_for_all
from .gloo_sockets import Connections
from .torch_engine import TorchEngine

WaitUntilSet = Callable[[Store, Sequence[str], timedelta], None]

_BACKEND_TYPES = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}


def allow_collectives(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of the CPU collectives of ``group``; connecting, which is over, may have had a shorter one."""
    backend: Any = group._get_backend(torch.device("cpu"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL it is within a backend that compares collectives.
    getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


class TorchEngineFactory:
    """Opens engines between some of the ranks, or all, each on a process group of its own over the ranks' store.

    It does not use `dist.new_group`, which every rank of the job would have to call for each engine, in one order with
    the program's own calls, since torch numbers groups by how many a rank has made. So the program may call
    `dist.new_group` at any time, whatever other threads open here.
    """

    def __init__(
        self, backend: str, ranks: ConnectingRanks, unused_default: tuple[dist.ProcessGroup, Connections] | None = None
    ) -> None:
        """``backend`` is ``gloo``, or a map such as ``cpu:gloo,cuda:nccl``; a RuntimeError for another one in the map.

        ``unused_default`` is the default process group, if hvdlite has made it, and its connections: the first engine
        is on this one.
        """
        self._ranks = ranks
        self._backend = backend
        self._backend_of = _backend_by_device(backend)
        self._has_nccl = self._backend_of["cuda"] == "nccl"
        self._unused_default = unused_default
        self._opened = itertools.count()
        # As long as the groups, which refer to them.
        self._stores: list[EndingStore] = []

    def open(self) -> Engine:
        if self._unused_default is not None:
            (default, connections), self._unused_default = self._unused_default, None
            return TorchEngine(default, has_nccl=self._has_nccl, cut=connections.end_waits)
        label = f"channel{next(self._opened)}"
        wait_for_all(self._ranks, label)
        try:
            group, connections = open_proven(
                partial(self._make, label), lambda made: made.shutdown(), self._ranks, label
            )
        except CommunicationError:
            raise
        except (OSError, RuntimeError) as error:
            # Torch's own, where a rank is lost while these connect.
            why = lack_of(error) or (
                f"one of them has ended or cannot be reached; look at their output for the cause ({error})"
            )
            own = self._ranks.names[self._ranks.rank]
            raise CommunicationError(f"{own} could not connect to the other ranks: {why}") from error
        shut_down = partial(_shut_down, group, connections)
        return TorchEngine(group, has_nccl=self._has_nccl, cut=connections.end_waits, shut_down=shut_down)

    def _make(self, label: str, connections: Connections) -> dist.ProcessGroup:
        store = PrefixStore(label, self._ranks.store)
        group = dist.ProcessGroup(store, self._ranks.rank, self._ranks.size)
        made: dict[str, Any] = {}
        for device, name in self._backend_of.items():
            if name not in made:
                made[name] = self._make_backend(name, PrefixStore(device, store), connections)
            group._register_backend(torch.device(device), _BACKEND_TYPES[name], made[name])
        group._set_default_backend(_BACKEND_TYPES[self._backend_of["cpu"]])
        return group

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        if len(group_ranks) == 1:
            return SingleRankFactory()
        return TorchEngineFactory(self._backend, self._ranks.among(group_ranks, group_rank, token))

    def _make_backend(self, name: str, store: Store, connections: Connections) -> Any:
        rank, size, init_timeout = self._ranks.rank, self._ranks.size, self._ranks.init_timeout
        if name == "gloo":
            # Held until gloo has connected.
            ending = EndingStore(store, init_timeout.left(), self._ranks.store_wait())
            gloo = make_gloo(ending, rank, size, init_timeout.left(), connections)
            gloo._set_default_timeout(init_timeout.timeout)
            self._stores.append(ending)
            return gloo
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = init_timeout.timeout
        options.global_ranks_in_group = list(self._ranks.global_ranks)  # NCCL's watchdog reports them
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _shut_down(group: dist.ProcessGroup, connections: Connections) -> None:
    connections.shut_down()
    group.shutdown()


def _backend_by_device(backend: str) -> dict[str, str]:
    """Returns the backend of CPU and of CUDA tensors, from ``gloo`` or from ``cpu:gloo,cuda:nccl``."""
    if ":" not in backend:
        return {"cpu": backend, "cuda": backend}
    backend_of = dict(item.split(":") for item in backend.split(","))
    unknown = sorted(set(backend_of.values()) - _BACKEND_TYPES.keys())
    if unknown:
        raise RuntimeError(
            f"torch.distributed.init_process_group was called with the backend {unknown[0]}, and hvdlite supports only "
            "gloo and nccl: choose one of these, or let hvd.init() call init_process_group"
        )
    return backend_of


class EndingStore(Store):
    """A store for gloo whose waits, by ``wait_until_set``, end when a rank ends, or fails to open its part.

    While gloo connects, it waits in the store for the address of each rank, and only the store can end that. C++ looks
    its methods up by name, and keeps no reference to the Python object: its maker must, while gloo connects.
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
