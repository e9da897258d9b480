"""
`ElasticSampler`: divides the samples that are left in an epoch among the current ranks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from ..runtime.world import rank, size


class ElasticSampler(Sampler[int]):
    """Divides the indices of a dataset that are left in this epoch among the ranks.

    Like `torch.utils.data.DistributedSampler`, but when the ranks change in the middle of an epoch, samples that were
    processed are not drawn again: give it to `TorchState`, and call `record_batch` after each batch. The last samples
    are repeated so that every rank has equally many. Every rank must make it with the same arguments.

    Call `set_epoch` at the *end* of an epoch, before the next begins. Behaves as Horovod's of that name.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """``shuffle`` draws another order in each epoch, from ``seed`` and the epoch's number."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: none of its samples has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of ``batch_size``; ``batch_idx`` is Horovod's, and unused."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Sized) -> None:
        """Note that every rank has processed as many samples as these."""
        self.processed_num += len(indices) * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of this rank's batch number ``batch_idx`` since the last call of `iter`."""
        start = batch_idx * batch_size
        return self.indices[start : start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many samples of it all ranks together have processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken, with the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left of the epoch among the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """This rank's indices, from the epoch's remaining ones as `reset` has divided them."""
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(itertools.islice(padded, self.rank, None, self.num_replicas))
        return iter(self.indices)

    def __len__(self) -> int:
        """How many samples each rank has left in this epoch."""
        return self.num_samples
