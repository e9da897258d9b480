"""
How many images of noise a second a network of torchvision's is trained on, with the flags and the last lines that are
known from Horovod.

    hvdlite-run -np 2 python -m hvdlite.horovod examples/horovod/synthetic_benchmark.py --model resnet50 --batch-size 32
"""

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torchvision import models

parser = argparse.ArgumentParser(
    description="Synthetic benchmark", formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel in half precision")
parser.add_argument("--model", default="resnet50", help="a name of torchvision.models")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--num-warmup-batches", type=int, default=10, help="that are not counted")
parser.add_argument("--num-batches-per-iter", type=int, default=10)
parser.add_argument("--num-iters", type=int, default=10)
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum")


def log(line):
    if hvd.rank() == 0:
        print(line, flush=True)


def main():
    args = parser.parse_args()
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    hvd.init()
    if use_cuda:
        torch.cuda.set_device(hvd.local_rank())

    model = getattr(models, args.model)()
    lr_scaler = hvd.size() if not args.use_adasum else 1
    if use_cuda:
        model.cuda()
        if args.use_adasum and hvd.nccl_built():
            lr_scaler = hvd.local_size()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data = torch.randn(args.batch_size, 3, 224, 224)
    target = torch.randint(1000, (args.batch_size,))
    if use_cuda:
        data, target = data.cuda(), target.cuda()

    def benchmark_step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()

    device = "GPU" if use_cuda else "CPU"
    log(f"Model: {args.model}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {device}s: {hvd.size()}")
    log("Running warmup...")
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)
    log("Running benchmark...")
    img_secs = []
    for iteration in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        img_sec = args.batch_size * args.num_batches_per_iter / seconds
        log(f"Iter #{iteration}: {img_sec:.1f} img/sec per {device}")
        img_secs.append(img_sec)

    mean, conf = np.mean(img_secs), 1.96 * np.std(img_secs)
    log(f"Img/sec per {device}: {mean:.1f} +-{conf:.1f}")
    log(f"Total img/sec on {hvd.size()} {device}(s): {hvd.size() * mean:.1f} +-{hvd.size() * conf:.1f}")


if __name__ == "__main__":
    main()
