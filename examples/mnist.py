"""
Trains a network on MNIST on several ranks, with a data set from files, data loaders and mixed precision.

    hvdlite-run -np 2 python examples/mnist.py --download          # the first time
    hvdlite-run -np 2 python examples/mnist.py --amp               # half precision where it is fast
    python examples/mnist.py                                       # the same program on one rank

The images are read from DATA_DIR/MNIST/raw, in the format of torchvision. This is a larger example than
digits.py; start from it if you have your own data set.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor
from tqdm import tqdm

import hvdlite as hvd

Loader = DataLoader[tuple[Tensor, Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def main() -> int:
    options = parse_options()
    hvd.init()
    device = pick_device()
    torch.manual_seed(options.seed + hvd.rank())

    try:
        train, test = load_mnist(options.data_dir, options.download)
    except DataMissingError as error:
        if hvd.rank() != 0:
            return 0  # rank 0 prints the error and fails for all
        print(f"mnist.py: {error}", file=sys.stderr)
        return 2

    # Every rank trains on its own part of the images, and tests on every size-th image, so that none is counted twice.
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=options.seed)
    train_loader: Loader = DataLoader(train, options.batch_size, sampler=sampler)
    test_loader: Loader = DataLoader(Subset(test, range(hvd.rank(), len(test), hvd.size())), batch_size=500)

    model = Net().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr * hvd.size(), momentum=options.momentum
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Mixed precision as in any PyTorch program. float16 needs gradient scaling, bfloat16 does not.
    half = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    autocast = torch.autocast(device.type, half, enabled=options.amp)
    scaler = torch.amp.GradScaler(device.type, enabled=options.amp and half == torch.float16)

    for epoch in range(1, options.epochs + 1):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        loss_sum = torch.zeros((), device=device)
        title = f"epoch {epoch}/{options.epochs}"
        for images, labels in tqdm(train_loader, title, disable=hvd.rank() != 0, mininterval=0.5):
            optimizer.zero_grad()
            with autocast:
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            loss_sum += loss.detach()
        train_loss = hvd.allreduce(loss_sum / len(train_loader), name="training loss").item()
        test_loss, accuracy = evaluate(model, test_loader, device)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}: training loss {train_loss:.4f}, test loss {test_loss:.4f}, "
                f"test accuracy {accuracy:.2%}, {time.perf_counter() - started:.1f} s"
            )
    return 0


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, device: torch.device) -> tuple[float, float]:
    """Computes loss and accuracy over the test images of all ranks."""
    model.eval()
    sums = torch.zeros(3, device=device)
    for images, labels in loader:
        logits = model(images.to(device))
        truth = labels.to(device)
        sums[0] += nn.functional.cross_entropy(logits, truth, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == truth).sum()
        sums[2] += len(labels)
    loss_sum, correct, count = hvd.allreduce(sums, name="test result", op=hvd.Sum).tolist()
    return loss_sum / count, correct / count


class DataMissingError(Exception):
    """The data set is missing or could not be downloaded; the message is printed to the user."""


def load_mnist(data_dir: Path, download: bool) -> tuple[MNIST, MNIST]:
    """Loads the training and test images. If one rank fails, all ranks raise a DataMissingError."""
    problem = None
    if download and hvd.local_rank() == 0:
        # One rank of each host downloads; the others wait for it at the barrier below.
        try:
            MNIST(data_dir, download=True)
        except (RuntimeError, OSError) as error:
            problem = f"the download failed: {str(error).splitlines()[0].rstrip(':')}"
    hvd.barrier()

    prepare = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    try:
        train, test = MNIST(data_dir, True, prepare), MNIST(data_dir, False, prepare)
    except (RuntimeError, OSError):
        problem = problem or (
            f"no MNIST in {data_dir / 'MNIST' / 'raw'}: add --download to fetch it, "
            "or say with --data-dir which directory holds MNIST/raw/train-images-idx3-ubyte"
        )

    # If one rank has failed, all must stop, or the others would wait for it: so exchange the errors.
    problems = hvd.allgather_object(problem, name="problem with the data")
    for found in problems:
        if found is not None:
            raise DataMissingError(found)
    return train, test


def pick_device() -> torch.device:
    """Returns this rank's own GPU if this machine has one for each of its ranks, otherwise the CPU."""
    if torch.cuda.device_count() < hvd.local_size():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network on MNIST, on one rank or many.",
        epilog="Two ranks on this machine: hvdlite-run -np 2 python examples/mnist.py --download",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where MNIST/raw is")
    parser.add_argument("--download", action="store_true", help="fetch the images into --data-dir first")
    parser.add_argument("--epochs", type=positive, default=5, help="passes over the training images")
    parser.add_argument("--batch-size", type=positive, default=64, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate, for one rank")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the SGD optimizer")
    parser.add_argument("--seed", type=int, default=0, help="of weights, shuffling and dropout")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 or float16 where that is safe")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
