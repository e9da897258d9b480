"""
One training, written in five ways: by hand, with a sum of gradients, with DDP, as a Horovod program, with hvdlite.

    hvdlite-run -np 2 python examples/five_ways.py

Each of the five functions below is complete, so that you can read them side by side. All five start from rank 0's
weights (the other ranks first have different ones), use the same images in the same order, and average the
gradients of all ranks. So a rank's losses are the same in all five: the program prints them in a table, and fails
if they differ.

It runs on the CPU and trains on scikit-learn's handwritten digits; nothing is downloaded. Under hvdlite-run,
`hvd.init()` also initialises `torch.distributed`, so code that was written for it works unchanged.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from tqdm import tqdm

import hvdlite as hvd

TOLERANCE = 1e-5

Batch = Sequence[Tensor]


@dataclass
class Task:
    """The data and settings of the training, equal for all five ways; also collects the times of the steps."""

    data: TensorDataset
    epochs: int
    batch_size: int
    lr: float
    seed: int
    progress: tqdm[None]
    step_seconds: list[float] = field(default_factory=list)

    def new_model(self) -> nn.Module:
        """Makes a small network with different weights on each rank; the training must start from rank 0's."""
        torch.manual_seed(self.seed + hvd.rank())
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def steps(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the loader's batches, and measures the time of each step."""
        for batch in loader:
            started = time.perf_counter()
            yield batch
            self.step_seconds.append(time.perf_counter() - started)
        self.progress.update()


# ---------------------------------------------------------------- (a) by hand


class Partition(Dataset[tuple[Tensor, ...]]):
    """The part of a data set that one rank trains on."""

    def __init__(self, data: TensorDataset, indices: Sequence[int]) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.data[self.indices[index]]


class DataPartitioner:
    """Shuffles a data set, in the same order on every rank, and divides it into equal parts."""

    def __init__(self, data: TensorDataset, parts: int, seed: int) -> None:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
        self.data = data
        self.parts = parts
        self.order = order[: len(order) // parts * parts]

    def part(self, number: int) -> Partition:
        return Partition(self.data, self.order[number :: self.parts])


def by_hand(task: Task) -> list[float]:
    """Uses only torch.distributed: all-reduces every parameter's gradient and divides it by the number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = task.new_model()
    for param in model.parameters():
        dist.broadcast(param.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)

    losses = []
    for epoch in range(task.epochs):
        partition = DataPartitioner(task.data, size, task.seed + epoch).part(rank)
        batches = DataLoader(partition, task.batch_size)
        total = 0.0
        for images, labels in task.steps(batches):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            for param in model.parameters():
                assert param.grad is not None, "every parameter is used"
                dist.all_reduce(param.grad)
                param.grad /= size
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
    return losses


# ---------------------------------------------- (b) classic synchronous SGD


def gradient_sum(task: Task) -> list[float]:
    """Sums gradients and divides the learning rate instead; rank 0 sends its weights to one rank after another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = task.new_model()
    for param in model.parameters():
        if rank == 0:
            for other in range(1, size):
                dist.send(param.data, dst=other)
        else:
            dist.recv(param.data, src=0)
    # lr / size times the sum equals lr times the average.
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr / size, momentum=0.9)

    losses = []
    for epoch in range(task.epochs):
        partition = DataPartitioner(task.data, size, task.seed + epoch).part(rank)
        batches = DataLoader(partition, task.batch_size)
        total = 0.0
        for images, labels in task.steps(batches):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            for param in model.parameters():
                assert param.grad is not None, "every parameter is used"
                dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
    return losses


# ------------------------------------------------- (c) DistributedDataParallel


def ddp(task: Task) -> list[float]:
    """Wraps the model in PyTorch's DistributedDataParallel, which averages the gradients during backward."""
    model = DistributedDataParallel(task.new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)

    sampler = DistributedSampler(task.data, seed=task.seed, drop_last=True)
    batches = DataLoader(task.data, task.batch_size, sampler=sampler)
    losses = []
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in task.steps(batches):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
    return losses


# ------------------------------ (d) a Horovod program, with its import changed


def horovod(task: Task) -> list[float]:
    """A program written for `import horovod.torch as hvd`; only the import was changed, to `import hvdlite as hvd`."""
    hvd.init()
    model = task.new_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        op=hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    sampler = DistributedSampler(task.data, num_replicas=hvd.size(), rank=hvd.rank(), seed=task.seed, drop_last=True)
    batches = DataLoader(task.data, task.batch_size, sampler=sampler)
    losses = []
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in task.steps(batches):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
        avg_loss = hvd.allreduce(torch.tensor(losses[-1]), name="avg_loss")
        task.progress.set_postfix(avg_loss=f"{avg_loss.item():.4f}", refresh=False)
    return losses


# --------------------------------------------------- (e) hvdlite's two lines


def hvdlite(task: Task) -> list[float]:
    """A training for one process with two lines added, which are marked, and a sampler for the rank's part."""
    model = task.new_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer)  # <- one
    hvd.broadcast_parameters(model.state_dict())  # <- two

    sampler = DistributedSampler(task.data, hvd.size(), hvd.rank(), seed=task.seed, drop_last=True)
    batches = DataLoader(task.data, task.batch_size, sampler=sampler)
    losses = []
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in task.steps(batches):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
    return losses


# ------------------------------------------------------- side by side

Way = Callable[[Task], list[float]]

WAYS: dict[str, Way] = {
    "by hand": by_hand,
    "sum": gradient_sum,
    "DDP": ddp,
    "Horovod": horovod,
    "hvdlite": hvdlite,
}

Losses = dict[str, list[list[float]]]
"""The losses by way, rank and epoch."""


def main() -> int:
    options = parse_options()
    hvd.init()
    with default_group():
        losses, step_ms = run_all(options)

    if hvd.rank() != 0:
        return 0
    print(table(losses, step_ms))
    difference = first_difference(losses)
    if difference is not None:
        print(f"five_ways.py: {difference}", file=sys.stderr)
        return 1
    print(f"\nAll five agree to {TOLERANCE:g} in every epoch on every rank.")
    return 0


def run_all(options: argparse.Namespace) -> tuple[Losses, dict[str, float]]:
    """Trains in all five ways; returns the losses of all ranks and the median milliseconds of a step, by way."""
    losses: Losses = {}
    step_ms: dict[str, float] = {}
    data = load_data()
    with tqdm(total=len(WAYS) * options.epochs, unit="epoch", disable=hvd.rank() != 0) as progress:
        for name, train in WAYS.items():
            progress.set_postfix_str("", refresh=False)
            progress.set_description(name, refresh=False)
            task = Task(data, options.epochs, options.batch_size, options.lr, options.seed, progress)
            own_losses = train(task)
            results = hvd.allgather_object((own_losses, task.step_seconds), name=name)
            losses[name] = [rank_losses for rank_losses, _ in results]
            step_ms[name] = 1000 * statistics.median(seconds for _, by_rank in results for seconds in by_rank)
    return losses, step_ms


def first_difference(losses: Losses) -> str | None:
    """Describes the first loss that differs from that of the first way by more than `TOLERANCE`; None without any."""
    (first, expected), *others = losses.items()
    for name, found in others:
        for rank, (own, wanted) in enumerate(zip(found, expected, strict=True)):
            for epoch, (loss, reference) in enumerate(zip(own, wanted, strict=True), start=1):
                if not abs(loss - reference) <= TOLERANCE:
                    return (
                        f"{name!r} differs from {first!r} by {abs(loss - reference):.2g} in epoch {epoch} "
                        f"on rank {rank}: {loss:.7f} instead of {reference:.7f}"
                    )
    return None


def table(losses: Losses, step_ms: dict[str, float]) -> str:
    """Formats the losses as a table with a column for each way and a row for each epoch and rank."""
    by_rank = next(iter(losses.values()))
    lines = ["loss of         " + "".join(f"{name:>12}" for name in losses)]
    for epoch in range(len(by_rank[0])):
        for rank in range(len(by_rank)):
            cells = "".join(f"{losses[name][rank][epoch]:12.7f}" for name in losses)
            lines.append(f"epoch {epoch + 1:2} rank {rank:2}{cells}")
    lines.append("ms per step     " + "".join(f"{step_ms[name]:12.2f}" for name in losses))
    return "\n".join(lines)


def load_data() -> TensorDataset:
    digits = load_digits()
    return TensorDataset(torch.from_numpy(digits.data).float() / 16.0, torch.from_numpy(digits.target).long())


@contextmanager
def default_group() -> Iterator[None]:
    """Makes torch.distributed's default group if `hvd.init` has not, because the program runs as a single process."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train one small network in five ways and compare their losses.",
        epilog="Two ranks on this machine: hvdlite-run -np 2 python examples/five_ways.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=positive, default=3, help="passes over the images, each way")
    parser.add_argument("--batch-size", type=positive, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffling")
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
