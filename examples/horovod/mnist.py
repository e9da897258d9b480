"""
Handwritten digits, as one trained them with Horovod: warm-up of the learning rate, mixed precision, averaged metrics.

    hvdlite-run -np 2 python -m hvdlite.horovod examples/horovod/mnist.py --use-mixed-precision

The images are scikit-learn's, 8 × 8 pixels; nothing is downloaded. It runs on GPUs where there are, else on the CPU.
"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TRAIN_IMAGES = 1408

parser = argparse.ArgumentParser(description="Digits with Horovod")
parser.add_argument("--batch-size", type=int, default=32, help="images of one rank in one backward pass")
parser.add_argument("--batches-per-allreduce", type=int, default=1, help="backward passes before gradients travel")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--base-lr", type=float, default=0.05, help="for one batch; it grows with the number of them")
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--max-norm", type=float, default=5.0, help="gradients are clipped to it, but with Adasum")
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel in half precision")
parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--use-mixed-precision", action="store_true")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3)
        self.fc1 = nn.Linear(80, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = nn.functional.relu(self.conv1(x))
        x = nn.functional.relu(nn.functional.max_pool2d(self.conv2(x), 2))
        x = nn.functional.relu(self.fc1(x.flatten(1)))
        return nn.functional.log_softmax(self.fc2(x).float(), dim=1)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def set_learning_rate(args, optimizer, epochs_done):
    """From one batch's rate to that of all batches together, within the first epochs (arXiv:1706.02677)."""
    batches = hvd.size() * args.batches_per_allreduce
    if args.use_adasum:
        batches = args.batches_per_allreduce
    warm = min(1.0, epochs_done / args.warmup_epochs) if args.warmup_epochs > 0 else 1.0
    growth = 1 + (batches - 1) * warm
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * growth


def train_epoch(args, epoch, model, optimizer, scaler, sampler, loader, device):
    model.train()
    sampler.set_epoch(epoch)
    total = 0.0
    for step, (data, target) in enumerate(loader):
        set_learning_rate(args, optimizer, epoch + step / len(loader))
        optimizer.zero_grad()
        parts = range(0, len(data), args.batch_size)
        for start in parts:
            part, labels = data[start : start + args.batch_size], target[start : start + args.batch_size]
            with torch.autocast(device.type, enabled=args.use_mixed_precision):
                loss = nn.functional.nll_loss(model(part.to(device)), labels.to(device)) / len(parts)
            total += loss.item()
            scaler.scale(loss).backward()
        if args.use_adasum:
            # It combines what the optimizer makes of each rank's gradients, within step(): no averages, none to clip.
            scaler.step(optimizer)
        else:
            # Clip the averages, not what this rank alone has.
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        scaler.update()
    return metric_average(total / len(loader), "train_loss")


def test(model, images, labels, device):
    model.eval()
    with torch.no_grad():
        output = model(images.to(device))
    loss = nn.functional.nll_loss(output, labels.to(device)).item()
    accuracy = (output.argmax(1).cpu() == labels).float().mean().item()
    return metric_average(loss, "avg_loss"), metric_average(accuracy, "avg_accuracy")


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    if use_cuda:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(digits.target)
    dataset = TensorDataset(images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES])
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, args.batch_size * args.batches_per_allreduce, sampler=sampler)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.use_mixed_precision)

    for epoch in range(args.epochs):
        loss = train_epoch(args, epoch, model, optimizer, scaler, sampler, loader, device)
        if hvd.rank() == 0:
            print(f"Train Epoch: {epoch} Loss: {loss:.6f} LR: {optimizer.param_groups[0]['lr']:.4f}")
    loss, accuracy = test(model, images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:], device)
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss:.6f}, Accuracy: {100 * accuracy:.2f}%")


if __name__ == "__main__":
    main()
