"""
Trains the network of digits.py on ranks that may come and go while it runs.

    hvdlite-run --min-np 1 --max-np 4 python examples/elastic.py

Kill any worker (``kill -9``): the others go back to the last commit, and a new worker takes its place. The accuracy at
the end is about the same. The bar shows on how many ranks the training runs, and how often that has changed. With

    echo localhost:2 > hosts
    hvdlite-run --min-np 1 --host-discovery-script 'cat hosts' python examples/elastic.py

the file sets the number of workers: write another number into it while the training runs.

The comments with numbers mark what makes a program elastic; the rest is as in digits.py.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time

import torch
from digits import build_model, count, evaluate, load_images, pick_device, positive
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import hvdlite as hvd


def main() -> int:
    options = parse_options()
    # What takes time comes before hvd.init(): the others wait for a new worker from there on.
    train, test = load_images()
    hvd.init()
    torch.manual_seed(options.seed + hvd.rank())
    device = pick_device()
    model = build_model().to(device)

    # 1. Make the model, the wrapped optimizer and the sampler once. They stay the same objects in all worlds.
    sampler = hvd.elastic.ElasticSampler(train, seed=options.seed)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=1e-4),
        named_parameters=model.named_parameters(),
    )

    # 2. Name what all ranks have in common. A new worker gets it from the oldest one, so nothing is broadcast here.
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, changes=0)

    # 3. Adapt what depends on the number of ranks each time it has changed.
    def note_change() -> None:
        state.changes += 1

    state.register_reset_callbacks([note_change])

    started = time.perf_counter()
    test_loss, test_accuracy = train_until_done(state, train, test, device, options)
    if hvd.rank() != 0:
        return 0
    print(
        f"test accuracy {test_accuracy:.2%} on {len(test)} images that were not trained on, test loss {test_loss:.4f}\n"
        f"after {count(options.epochs, 'epoch')}, at last on {count(hvd.size(), 'rank')}, whose number changed "
        f"{count(state.changes, 'time')}; {time.perf_counter() - started:.1f} s"
    )
    if test_accuracy < options.min_accuracy:
        print(
            f"elastic.py: test accuracy {test_accuracy:.2%} is below --min-accuracy {options.min_accuracy:.2%}",
            file=sys.stderr,
        )
        return 1
    return 0


# 4. This function is called again in each new world, with the state of the last commit if a rank was lost.
@hvd.elastic.run
def train_until_done(
    state: hvd.elastic.TorchState,
    train: TensorDataset,
    test: TensorDataset,
    device: torch.device,
    options: argparse.Namespace,
) -> tuple[float, float]:
    """Trains from where the state is; returns loss and accuracy on the test images."""
    loader = DataLoader(train, options.batch_size, sampler=state.sampler)
    loss, accuracy = math.nan, 0.0
    what = f"training on {count(hvd.size(), 'rank')} (pid {os.getpid()}), {count(state.changes, 'change')}"
    with tqdm(initial=state.epoch, total=options.epochs, desc=what, unit="epoch", disable=hvd.rank() != 0) as progress:
        while state.epoch < options.epochs:
            train_epoch(state, loader, device, options)
            loss, accuracy = evaluate(state.model, test, device)
            progress.set_postfix(loss=f"{loss:.4f}", accuracy=f"{accuracy:.2%}", refresh=False)
            progress.update()
        if math.isnan(loss):  # a rank was lost after the last epoch
            loss, accuracy = evaluate(state.model, test, device)
    return loss, accuracy


def train_epoch(
    state: hvd.elastic.TorchState,
    loader: DataLoader[tuple[Tensor, ...]],
    device: torch.device,
    options: argparse.Namespace,
) -> None:
    """Trains on what this epoch has not seen yet, and begins the next."""
    state.model.train()
    for batch, (images, labels) in enumerate(loader):
        done = state.sampler.processed_num / len(state.sampler.dataset)
        set_learning_rate(state.optimizer, options.lr * hvd.size(), (state.epoch + min(done, 1.0)) / options.epochs)
        state.optimizer.zero_grad()
        nn.functional.cross_entropy(state.model(images.to(device)), labels.to(device)).backward()
        state.optimizer.step()
        # 5. Note what was processed, and commit now and then: a lost rank costs what was done since the last commit.
        state.sampler.record_batch(batch, options.batch_size)
        if (batch + 1) % options.batches_per_commit == 0:
            state.commit()
    # 6. At the end of an epoch the sampler begins the next.
    state.epoch += 1
    state.sampler.set_epoch(state.epoch)
    state.commit()


def set_learning_rate(optimizer: torch.optim.Optimizer, highest: float, progress: float) -> None:
    """Sets a rate that rises and then falls over the training; it depends on no number of steps, which may change."""
    rise = 0.3
    fall = max(0.0, progress - rise) / (1 - rise)
    factor = min(progress / rise, (1 + math.cos(math.pi * fall)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = highest * max(factor, 0.04)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits, on ranks that may come and go.",
        epilog="Up to four ranks on this machine: hvdlite-run --min-np 1 --max-np 4 python examples/elastic.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=positive, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=positive, default=32, help="images per step and rank")
    parser.add_argument("--batches-per-commit", type=positive, default=5, help="steps until the next commit")
    parser.add_argument("--lr", type=float, default=0.05, help="highest learning rate, for one rank")
    parser.add_argument("--seed", type=int, default=0, help="of weights, shuffling and dropout")
    parser.add_argument(
        "--min-accuracy", type=float, default=0.0, metavar="PART", help="exit with 1 if it ends below, such as 0.97"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
