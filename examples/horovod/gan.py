"""
A GAN, as one trained it with Horovod: two networks, each with an optimizer of its own.

    hvdlite-run -np 2 python -m hvdlite.horovod examples/horovod/gan.py

What is learned is to throw points on a ring of eight spots; nothing is downloaded. `--batch-size` is that of all ranks
together: each draws the same points, and takes its share of them.
"""

import argparse
import math

import horovod.torch as hvd
import torch
from torch import nn

LATENT = 8
SPOTS = 8

parser = argparse.ArgumentParser(description="A GAN with Horovod")
parser.add_argument("--batch-size", type=int, default=128, help="points of all ranks together")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--double", action="store_true", help="compute in double precision: a GAN magnifies every rounding")
parser.add_argument("--log-interval", type=int, default=100)


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def real_points(count, random):
    angle = torch.randint(SPOTS, (count,), generator=random) * (2 * math.pi / SPOTS)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2, generator=random)


def my_share(points):
    return points[hvd.rank() :: hvd.size()]


def set_requires_grad(net, required):
    for parameter in net.parameters():
        parameter.requires_grad_(required)


def named(prefix, net):
    return [(f"{prefix}.{name}", parameter) for name, parameter in net.named_parameters()]


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())
    if args.double:
        torch.set_default_dtype(torch.float64)
    net_g, net_d = network(LATENT, 2), network(2, 1)
    hvd.broadcast_parameters(net_g.state_dict(), root_rank=0)
    hvd.broadcast_parameters(net_d.state_dict(), root_rank=0)
    criterion = nn.BCEWithLogitsLoss()

    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=args.lr, betas=(0.5, 0.999))
    # The discriminator goes backward twice in a step, through real points and through made ones.
    optimizer_d = hvd.DistributedOptimizer(optimizer_d, named("D", net_d), backward_passes_per_step=2)
    optimizer_g = hvd.DistributedOptimizer(optimizer_g, named("G", net_g))

    random = torch.Generator().manual_seed(args.seed)  # the same on all ranks
    for step in range(1, args.steps + 1):
        real = my_share(real_points(args.batch_size, random))
        noise = my_share(torch.randn(args.batch_size, LATENT, generator=random))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        set_requires_grad(net_d, True)
        optimizer_d.zero_grad()
        err_d_real = criterion(net_d(real), ones)
        err_d_real.backward()
        fake = net_g(noise)
        err_d_fake = criterion(net_d(fake.detach()), zeros)
        err_d_fake.backward()
        optimizer_d.step()

        set_requires_grad(net_d, False)
        optimizer_g.zero_grad()
        err_g = criterion(net_d(fake), ones)
        err_g.backward()
        optimizer_g.step()

        if step % args.log_interval == 0 or step == args.steps:
            loss_d = hvd.allreduce(err_d_real.detach() + err_d_fake.detach(), name="lossD").item()
            loss_g = hvd.allreduce(err_g.detach(), name="lossG").item()
            if hvd.rank() == 0:
                print(f"[{step}/{args.steps}] Loss_D: {loss_d:.6f} Loss_G: {loss_g:.6f}")

    with torch.no_grad():
        radius = net_g(torch.randn(1000, LATENT, generator=random)).norm(dim=1)
    if hvd.rank() == 0:
        print(f"mean distance of made points from the middle: {radius.mean():.3f} (of real ones: 1.000)")


if __name__ == "__main__":
    main()
