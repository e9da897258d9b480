"""Numbers of every kind for which a codec could round, flush or overflow in another way."""

from __future__ import annotations

import numpy as np
import torch

KINDS = ["ordinary", "zeros", "huge", "denormal", "tiny", "mixed", "one large", "ties"]


def samples(kind: str, numel: int, seed: int) -> torch.Tensor:
    """Returns float32 numbers of a kind, the same for the same seed."""
    random = np.random.default_rng(seed)
    ordinary = random.standard_normal(numel)
    values = {
        "ordinary": ordinary,
        "zeros": np.zeros(numel),
        "huge": ordinary * 1e38,
        "denormal": ordinary * 1e-40,
        "tiny": ordinary * 1e-29,
        "mixed": ordinary * 10.0 ** random.integers(-20, 20, numel),
        "one large": np.where(np.arange(numel) == numel // 2, 1e6, ordinary * 1e-3),
        "ties": random.integers(-254, 255, numel) / 2.0,
    }[kind]
    return torch.from_numpy(np.clip(values, -3e38, 3e38).astype(np.float32))
