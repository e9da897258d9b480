"""
What a GPU is measured by; prints shares, and asserts nothing.

    python tests/gpu/measure.py kernel     scale and cast of a 64 MB bucket: share of the device's copy bandwidth
    python tests/gpu/measure.py codecs     int8 and int4 of a 64 MB bucket, both ways: the same
    python tests/gpu/measure.py graph      a captured step beside an eager one

Rivals take turns, and medians are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from statistics import median, quantiles

import torch
from torch import Tensor, nn

import hvdlite as hvd
from hvdlite.compression import kernels
from hvdlite.compression.codec_kernels import kernels_for
from hvdlite.compression.codecs import Int4, Int8, wire_bytes

GPU = torch.device("cuda", 0)
BUCKET_BYTES = 64 * 10**6
ROUNDS = 40
COPY = "copy of a bucket"


def milliseconds(action: Callable[[], object], repeats: int) -> float:
    """Returns the GPU's milliseconds for one of several repeats."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(repeats):
        action()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / repeats


def take_turns(rivals: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Runs the candidates in turns; returns the times of each, by name."""
    for action in rivals.values():
        milliseconds(action, 3)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(ROUNDS):
        for name, action in rivals.items():
            times[name].append(milliseconds(action, repeats))
    return times


def show(name: str, times: list[float], what: str) -> None:
    low, *_, high = quantiles(times, n=10)
    print(f"{name:44} {median(times):9.4f} ms  (10 % to 90 %: {low:.4f} to {high:.4f})  {what}")


class Rotating:
    """As many copies of a tensor as it takes that no cache holds the next one."""

    def __init__(self, tensor: Tensor) -> None:
        self._copies = [tensor.clone() for _ in range(6)]
        self.dtype = tensor.dtype
        self._turn = 0

    def next(self) -> Tensor:
        self._turn = (self._turn + 1) % len(self._copies)
        return self._copies[self._turn]


def kernel() -> None:
    numel = BUCKET_BYTES // 4
    bucket, other = (Rotating(torch.randn(numel, device=GPU)) for _ in range(2))
    rivals: dict[str, Callable[[], object]] = {COPY: lambda: other.next().copy_(bucket.next())}

    def compare(name: str, source: Rotating, factor: float, out: Rotating) -> None:
        """Compares cupy's kernel, if it works, with PyTorch in one pass and in two."""
        compiled = kernels._cupy_kernels(GPU, source.dtype, out.dtype)
        if compiled is not None:
            rivals[f"{name}, cupy"] = lambda: compiled.scale_cast(source.next(), factor, out.next())
        rivals[f"{name}, torch"] = lambda: kernels.scale_cast_in_torch(source.next(), factor, out.next())
        rivals[f"{name}, torch, in two passes"] = lambda: out.next().copy_(source.next().mul_(factor))

    for dtype in (torch.float16, torch.bfloat16):
        wire = Rotating(torch.randn(numel, device=GPU).to(dtype))
        compare(f"bucket to {dtype}", bucket, 1 / 3, wire)
        compare(f"{dtype} to bucket", wire, 3 / 2, bucket)
    times = take_turns(rivals, repeats=20)
    # Bytes that must be read and written, per millisecond.
    copy_rate = 8 * numel / median(times[COPY])
    for name, own in times.items():
        rate = (8 if name == COPY else 6) * numel / median(own)
        show(name, own, f"{rate / copy_rate:7.1%} of the copy's bandwidth")
    by_one = torch.ones((), device=GPU)
    (own,) = take_turns({"": lambda: kernels.scale_by(bucket.next(), by_one)}, repeats=20).values()
    show("bucket × a 1 of the device's", own, f"{median(own) / median(times[COPY]):7.1%} of the copy's time")


def codecs() -> None:
    numel = BUCKET_BYTES // 4
    bucket, other, residual = (Rotating(torch.randn(numel, device=GPU)) for _ in range(3))
    rivals: dict[str, Callable[[], object]] = {COPY: lambda: other.next().copy_(bucket.next())}
    # Bytes that must be read and written.
    nbytes = {COPY: 8 * numel}

    def compare(codec: Int8 | Int4) -> None:
        """Compares cupy's kernels, if they work, with PyTorch's operations."""
        wire = Rotating(torch.zeros(wire_bytes(codec, numel), dtype=torch.uint8, device=GPU))
        codec.encode_all(bucket.next(), wire.next(), None)
        ways = [("torch", codec.encode_in_torch, codec.add_decoded_in_torch)]
        compiled = kernels_for(type(codec), bucket.next())
        if compiled is not None:
            ways.append(("cupy", compiled.encode, compiled.add_decoded))
        for way, encode, add_decoded in ways:
            encoding, decoding = f"{codec} encode with feedback, {way}", f"{codec} decode two wires, {way}"
            rivals[encoding] = lambda encode=encode: encode(bucket.next(), wire.next(), residual.next())
            rivals[decoding] = lambda add=add_decoded: add([wire.next(), wire.next()], other.next(), 0.5)
            nbytes[encoding], nbytes[decoding] = (
                12 * numel + wire_bytes(codec, numel),
                4 * numel + 2 * wire_bytes(codec, numel),
            )

    for codec in (hvd.Compression.int8, hvd.Compression.int4):
        compare(codec)
    times = take_turns(rivals, repeats=20)
    copy_rate = nbytes[COPY] / median(times[COPY])
    for name, own in times.items():
        show(name, own, f"{nbytes[name] / median(own) / copy_rate:7.1%} of the copy's bandwidth")


def many_tensors() -> nn.Module:
    """Makes tensors like ResNet-50's parameters: 23 million elements in 162 tensors."""
    torch.manual_seed(0)
    layers = []
    for _ in range(53):
        layers += [nn.Conv2d(218, 218, 3, padding=1, bias=False), nn.BatchNorm2d(218), nn.ReLU()]
    return nn.Sequential(
        nn.Conv2d(3, 218, 3, bias=False), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(218, 10)
    )


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    x = torch.randn(32, 3, 28, 28, device=GPU)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def graph() -> None:
    hvd.init()
    models = [many_tensors().to(GPU) for _ in range(2)]
    eager, captured = (
        step_of(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters())) for model in models
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            captured()
    torch.cuda.current_stream().wait_stream(side)
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        captured()
    times = take_turns({"eager": eager, "replayed": whole.replay}, repeats=2)
    for name, own in times.items():
        show(name, own, f"{median(own) / median(times['eager']) - 1:+7.2%}")
    hvd.shutdown()


if __name__ == "__main__":
    ACTIONS = {"kernel": kernel, "codecs": codecs, "graph": graph}
    if sys.argv[1:] == [] or not set(sys.argv[1:]) <= ACTIONS.keys():
        sys.exit(f"usage: measure.py {'|'.join(ACTIONS)} ...")
    if not torch.cuda.is_available():
        sys.exit("measure.py: no CUDA device on this machine")
    for action in sys.argv[1:]:
        ACTIONS[action]()
