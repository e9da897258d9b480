"""
Elastic training with Horovod: workers may be added, removed and lost while it runs.

    echo localhost:2 > hosts
    hvdlite-run --horovod --min-np 1 --host-discovery-script 'cat hosts' python examples/horovod/elastic.py

Write another number into the file while it runs: the next epochs are trained on so many workers. What is learned is a
function of noise, so that nothing is downloaded.
"""

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="Elastic training with Horovod")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
parser.add_argument("--batches-per-commit", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.01, help="of one worker")
parser.add_argument("--seed", type=int, default=7)
args = parser.parse_args()

hvd.init()
torch.manual_seed(args.seed)
random = torch.Generator().manual_seed(args.seed)
inputs = torch.randn(2048, 10, generator=random)
dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def on_state_reset():
    """Scales the learning rate to the number of workers that there are now."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * hvd.size()


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020
        losses = []
        for batch_idx, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            state.sampler.record_batch(batch_idx, args.batch_size)
            if batch_idx % args.batches_per_commit == 0:
                state.commit()
        # The world may have changed when all of this epoch was processed.
        if losses:
            mean = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
            if hvd.rank() == 0:
                print(f"Epoch {state.epoch + 1}: loss {mean:.6f} on {hvd.size()} workers")
        state.sampler.set_epoch(state.epoch + 1)


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
