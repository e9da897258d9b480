"""
The states of the random number generators of a process, as tensors and plain values: `random_states`, `restore`.

Those of PyTorch on the CPU and on the current GPU, of NumPy if the program uses it, and of Python's `random`. They are
what ``torch.load(weights_only=True)`` accepts. `checkpoint` saves those of each rank.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Returns the states of this process's generators."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := _numpy_random()) is not None:
        kind, keys, *rest = numpy.get_state()
        states["numpy"] = [kind, torch.tensor(keys.tolist(), dtype=torch.int64, device="cpu"), *rest]
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Sets this process's generators to what `random_states` returned, as far as it has them."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := _numpy_random()) is not None:
        kind, keys, *rest = states["numpy"]
        numpy.set_state((kind, keys.tolist(), *rest))


def _numpy_random() -> Any:
    # Not imported for this: a program without it has no such numbers.
    return sys.modules.get("numpy.random")
