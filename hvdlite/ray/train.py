"""
`HvdliteConfig`: the `BackendConfig` with which Ray Train's workers are ranks.

    TorchTrainer(train_fn, torch_config=HvdliteConfig()) ── on_start gives each worker its place
        ── train_fn calls hvd.init() ── on_shutdown calls hvd.shutdown()
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from ..runtime.world import shutdown
from .places import import_ray, own_facts, places_of, start_store, take

_ray = import_ray("ray")
_Backend: Any = import_ray("ray.train.backend", "[train]").Backend
_BackendConfig: Any = import_ray("ray.train.backend", "[train]").BackendConfig
_errors = import_ray("ray.exceptions")

# How long workers may take to leave. They are ended afterwards.
_LEAVING_S = 10.0


class _HvdliteBackend(_Backend):  # type: ignore[misc]  # of type Any: Ray may not be installed
    """Prepares the workers of one run. Ray makes a single object of a backend, so it has no state."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: HvdliteConfig) -> None:
        # Ray Train numbers its workers itself, and has put those of a node beside each other. It has also set which
        # GPUs they see.
        facts = [replace(each, gpus=()) for each in worker_group.execute(own_facts)]
        store = start_store()
        places = places_of(facts, secrets.token_hex(16))
        _ray.get([worker_group.execute_single_async(place.placement.rank, take, place, store) for place in places])

    def on_shutdown(self, worker_group: Any, backend_config: HvdliteConfig) -> None:
        try:
            _ray.get(worker_group.execute_async(shutdown), timeout=_LEAVING_S)
        except _errors.GetTimeoutError:
            return  # Ray ends them next


@dataclass
class HvdliteConfig(_BackendConfig):  # type: ignore[misc]  # of type Any: Ray may not be installed
    """Makes the workers of a trainer of Ray Train the ranks of `hvd.init()`, which the training function calls.

    Ranks are Ray Train's world ranks. Pass it as ``torch_config`` to a ``TorchTrainer``, or as ``backend_config`` to a
    ``DataParallelTrainer``.
    """

    # TorchTrainer looks for it, and would choose one for PyTorch if there were none.
    backend = "hvdlite"

    @property
    def backend_cls(self) -> type[_HvdliteBackend]:
        return _HvdliteBackend
