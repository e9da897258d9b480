"""
Training that goes on where it was stopped, as one wrote it with Horovod: rank 0 saves, and what it loads all get.

    hvdlite-run -np 2 python -m hvdlite.horovod examples/horovod/resume.py --epochs 4
    hvdlite-run -np 2 python -m hvdlite.horovod examples/horovod/resume.py --epochs 8

The second goes on at the fifth epoch. What is learned is a function of noise, so that nothing is downloaded.
"""

import argparse
import os

import horovod.torch as hvd
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Checkpoint and resume with Horovod")
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pt")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=7)


def synthetic_data(seed):
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(1024, 10, generator=random)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def save_checkpoint(args, epoch, model, optimizer, scheduler):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())

    # Rank 0 alone may see the directory.
    resume_from_epoch = 0
    for try_epoch in range(args.epochs, 0, -1):
        if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
            resume_from_epoch = try_epoch
            break
    resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

    dataset = synthetic_data(args.seed)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)

    scheduler_state = None
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler_state = checkpoint["scheduler"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler_state = hvd.broadcast_object(scheduler_state, root_rank=0, name="scheduler")
    if scheduler_state is not None:
        scheduler.load_state_dict(scheduler_state)

    for epoch in range(resume_from_epoch, args.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        scheduler.step()
        mean = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
        if hvd.rank() == 0:
            print(f"Epoch {epoch + 1}: loss {mean:.6f}")
        save_checkpoint(args, epoch, model, optimizer, scheduler)


if __name__ == "__main__":
    main()
