"""
Trains a small network to read handwritten digits, on several ranks, each on its own part of the images.

    hvdlite-run -np 2 python examples/digits.py
    hvdlite-run -np 2 python examples/digits.py --epochs 30 --plot digits.png
    python examples/digits.py                                  # the same program on one rank

The images are part of scikit-learn: 1,797 real digits of 8 × 8 pixels, so nothing is downloaded. A fifth of them
is kept for testing. The comments with numbers in `main` mark the lines that make the training distributed;
everything else is ordinary PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from tqdm import tqdm

import hvdlite as hvd


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch, over all ranks."""

    train_loss: float
    test_loss: float
    test_accuracy: float


def main() -> int:
    options = parse_options()

    # 1. Connect to the other ranks.
    hvd.init()
    device = pick_device()

    # Give every rank its own random numbers. The initial weights differ too, until rank 0's are broadcast below.
    torch.manual_seed(options.seed + hvd.rank())
    model = build_model().to(device)

    # 2. Train every rank on its own part of the images, shuffled anew in each epoch.
    train, test = load_images()
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=options.seed)
    loader = DataLoader(train, options.batch_size, sampler=sampler)

    # 3. Average the gradients over all ranks in each step. All ranks together train on a batch that is `size` times as
    #    large, so the learning rate is `size` times as high.
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr * hvd.size(), momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.lr * hvd.size(), epochs=options.epochs, steps_per_epoch=len(loader)
    )

    # 4. Start all ranks with rank 0's weights.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    started = time.perf_counter()
    history: list[Epoch] = []
    progress = tqdm(range(options.epochs), desc="training", unit="epoch", disable=hvd.rank() != 0)
    for epoch in progress:
        sampler.set_epoch(epoch)
        train_loss = train_epoch(model, loader, optimizer, scheduler, device)
        test_loss, test_accuracy = evaluate(model, test, device)
        history.append(Epoch(train_loss, test_loss, test_accuracy))
        progress.set_postfix(loss=f"{train_loss:.4f}", accuracy=f"{test_accuracy:.2%}", refresh=False)
    seconds = time.perf_counter() - started

    # 5. All ranks have the same results: print and check them on rank 0 only.
    if hvd.rank() != 0:
        return 0
    last = history[-1]
    print(
        f"test accuracy {last.test_accuracy:.2%} on {len(test)} images that were not trained on\n"
        f"training loss {last.train_loss:.4f}, test loss {last.test_loss:.4f} "
        f"after {count(options.epochs, 'epoch')} on {count(hvd.size(), 'rank')} ({device.type}), {seconds:.1f} s"
    )
    if options.plot is not None:
        plot(history, options.plot)
        print(f"plotted in {options.plot}")
    if last.test_accuracy < options.min_accuracy:
        print(
            f"digits.py: test accuracy {last.test_accuracy:.2%} is below --min-accuracy {options.min_accuracy:.2%}",
            file=sys.stderr,
        )
        return 1
    return 0


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(32 * 4 * 4, 10),
    )


def load_images(test_part: float = 0.2) -> tuple[TensorDataset, TensorDataset]:
    """Loads the training and test images; the split is the same on every rank and in every run."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16.0
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test_count = int(len(images) * test_part)
    test, train = order[:test_count], order[test_count:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train_epoch(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
) -> float:
    """Trains for one pass over this rank's part; returns the mean loss of all ranks."""
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
    # Every rank has the same number of batches, so the average of the ranks' means is the overall mean.
    return hvd.allreduce(total / len(loader), name="training loss").item()


@torch.no_grad()
def evaluate(model: nn.Module, test: Dataset[tuple[Tensor, ...]], device: torch.device) -> tuple[float, float]:
    """Computes loss and accuracy on all test images; each rank evaluates its own part of them."""
    model.eval()
    # Not a DistributedSampler, which repeats images until all ranks have the same number.
    images, labels = (part.to(device) for part in test[hvd.rank() :: hvd.size()])
    logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    # Sums, not averages, because the parts may differ in size.
    sums = torch.stack([loss, correct, torch.tensor(len(labels), device=device)])
    loss_sum, correct_sum, image_count = hvd.allreduce(sums, name="test result", op=hvd.Sum).tolist()
    return loss_sum / image_count, correct_sum / image_count


def pick_device() -> torch.device:
    """Returns this rank's own GPU if this machine has one for each of its ranks, otherwise the CPU."""
    if torch.cuda.device_count() < hvd.local_size():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def plot(history: list[Epoch], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - matplotlib is needed only with --plot

    epochs = range(1, len(history) + 1)
    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle(f"Handwritten digits on {count(hvd.size(), 'rank')}")
    losses, accuracies = figure.subplots(1, 2)

    losses.plot(epochs, [epoch.train_loss for epoch in history], label="training")
    losses.plot(epochs, [epoch.test_loss for epoch in history], label="test")
    losses.set(title="Loss", xlabel="epoch", ylabel="cross-entropy", yscale="log")
    losses.legend()

    accuracies.plot(epochs, [100 * epoch.test_accuracy for epoch in history], color="tab:green")
    accuracies.set(title="Test accuracy", xlabel="epoch", ylabel="% of test images read right")
    accuracies.annotate(
        f"{history[-1].test_accuracy:.2%}",
        xy=(len(history), 100 * history[-1].test_accuracy),
        xytext=(0, -18),
        textcoords="offset points",
        ha="right",
    )
    for axes in (losses, accuracies):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits, on one rank or many.",
        epilog="Two ranks on this machine: hvdlite-run -np 2 python examples/digits.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=positive, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=positive, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.05, help="highest learning rate, for one rank")
    parser.add_argument("--seed", type=int, default=0, help="of weights, shuffling and dropout")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw the curves into this .png, .pdf or .svg")
    parser.add_argument(
        "--min-accuracy", type=float, default=0.0, metavar="PART", help="exit with 1 if it ends below, such as 0.97"
    )
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def new_file(text: str) -> Path:
    # Checked here, so that a wrong path is reported before the training and not after it.
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.absolute().parent}")
    return path


if __name__ == "__main__":
    sys.exit(main())
