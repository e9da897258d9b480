"""
Plans the buckets: assigns each gradient to a slice of a flat buffer, before any memory is allocated.

    ParamSpec (name, shape, stride, dtype, device) ── plan_buckets ── BucketPlan (slices of a flat buffer)

Pure values and functions, called by `layout`, `autotune` and the benchmark. The buffers themselves are in `bucket`. All
ranks make the same plan, since it depends only on the specs. The ranks compare these (`first_difference`) before they
send the first gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from ..errors import list_names

# The elements of a bucket's tail for each slice: see `BucketPlan`.
FLAGS_PER_SLICE = 3

# Slices begin at multiples of this, so that every gradient is aligned like a separately allocated tensor.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The properties of a parameter that a plan depends on.

    ``stride`` is the layout of its gradient in the bucket: the parameter's own if that is dense (channels_last stays
    channels_last), else the contiguous one. ``trainable`` is whether it required a gradient when it was planned.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    trainable: bool

    @classmethod
    def of(cls, name: str, param: Tensor, *, trainable: bool | None = None) -> ParamSpec:
        """Returns the spec of a parameter with this name. ``trainable``: by default, whether it is so now."""
        shape = tuple(param.shape)
        stride = param.stride() if is_dense(shape, param.stride()) else _contiguous_stride(shape)
        trainable = param.requires_grad if trainable is None else trainable
        return cls(name, shape, stride, param.dtype, param.device, trainable)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def describe(self) -> str:
        """Returns the spec as text, for messages. It leaves out the device's index, which may differ by rank."""
        layout = "" if self.stride == _contiguous_stride(self.shape) else f", strides {self.stride}"
        frozen = "" if self.trainable else ", frozen"
        return f"shape {self.shape}, {self.dtype}, on {self.device.type}{layout}{frozen}"


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a bucket's buffer that holds one parameter's gradient; ``start`` and ``stop`` are in elements."""

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The layout of one flat buffer: gradients first, then a tail of flags, all of one dtype on one device.

    The tail holds counts that all ranks need, and would otherwise sum in a second collective: for every slice the
    number of ranks that used the parameter, of those with a sparse gradient for it, and of those that train it; the
    number of ranks that sit out this step and do not count (see `join`); the number that take part, in ``count_slots``
    elements; the numbers of those that drop the averages and that keep them; and, in the first bucket only, the ranks'
    numbers of samples, in ``weight_slots`` elements: see `Weights`.

    Where ranks share the optimizer's work, ``bounds`` has one number more than there are ranks: rank r updates the
    elements from ``bounds[r]`` to ``bounds[r + 1]``. Otherwise it is empty.
    """

    slices: tuple[Slice, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True
    count_slots: int = 1
    weight_slots: int = 0
    bounds: tuple[int, ...] = ()

    @property
    def grad_numel(self) -> int:
        """The number of elements of the gradients, with the gaps that keep them aligned."""
        return _align(self.slices[-1].stop, self.dtype, self.aligned) if self.slices else 0

    @property
    def numel(self) -> int:
        return self.weight_start + self.weight_slots

    @property
    def weight_start(self) -> int:
        """The offset in the buffer at which the ranks' numbers of samples begin."""
        return self.grad_numel + FLAGS_PER_SLICE * len(self.slices) + 1 + self.count_slots + 2

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter of the bucket required a gradient when it was planned."""
        return not any(piece.spec.trainable for piece in self.slices)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def without(self, names: set[str]) -> BucketPlan:
        """Returns the plan of the same bucket without these parameters. The others move together."""
        kept = [piece.spec for piece in self.slices if piece.spec.name not in names]
        return replace(self, slices=lay_out(kept, self.dtype, self.aligned), bounds=())

    def describe(self) -> str:
        """Returns a text for messages that names the bucket by its first parameters."""
        return f"gradients of {list_names([piece.spec.name for piece in self.slices[:3]], len(self.slices))}"


def plan_buckets(
    specs: Sequence[ParamSpec],
    *,
    cap_bytes: int,
    groups: Iterable[Iterable[str]] = (),
    aligned: bool = True,
    count_slots: int = 1,
) -> tuple[BucketPlan, ...]:
    """Packs parameters, last first, into buckets of at most ``cap_bytes`` of gradients. With 0 each has its own bucket.

    Backward computes gradients roughly from the last parameter to the first. So the first bucket is full first, and is
    sent while the rest is still being computed (the order of PyTorch's DDP, https://arxiv.org/abs/2006.15704).

    Buckets do not mix dtypes, devices, or frozen with trainable parameters. Only a single parameter, or one of
    ``groups``, may exceed the cap. The parameters named in a group share a bucket for each dtype and device, however
    large it is, as in Horovod. Parameters that can have no gradient are left out. Without ``aligned`` there are no gaps
    between gradients. ``count_slots`` is the number of elements of a bucket that count the ranks that take part.
    """
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    packed: list[list[ParamSpec]] = []
    open_bucket: dict[tuple[object, ...], int] = {}
    filled: dict[int, int] = {}
    for spec in reversed(specs):
        if not can_have_gradient(spec.dtype):
            continue
        group = group_of.get(spec.name)
        key = (spec.dtype, spec.device, spec.trainable, group)
        need = _align(spec.numel, spec.dtype, aligned) * spec.dtype.itemsize
        index = open_bucket.get(key)
        if index is None or (group is None and (cap_bytes == 0 or filled[index] + need > cap_bytes)):
            index = open_bucket[key] = len(packed)
            packed.append([])
            filled[index] = 0
        packed[index].append(spec)
        filled[index] += need
    buckets = [
        BucketPlan(
            lay_out(members, members[0].dtype, aligned),
            members[0].dtype,
            members[0].device,
            aligned=aligned,
            count_slots=count_slots,
        )
        for members in packed
    ]
    # The first bucket is sent in every step: one of frozen parameters is the first only if there is no other.
    return tuple(sorted(buckets, key=lambda bucket: bucket.is_frozen))


def first_of(names: Sequence[str]) -> str:
    """Returns the first three names, and the number of further ones, for messages."""
    return list_names(names[:3], len(names))


def can_have_gradient(dtype: torch.dtype) -> bool:
    """Whether a parameter of this dtype can require a gradient: integers and booleans cannot."""
    return dtype.is_floating_point or dtype.is_complex


# A description of a model, for ranks to compare: the name and `ParamSpec.describe` of every parameter.
Description = Sequence[tuple[str, str]]


def first_difference(mine: Description, theirs: Description) -> tuple[str, str, str] | None:
    """Returns the first parameter that differs, as (name, my description, their description), or None."""
    for ours, other in zip_longest(mine, theirs):
        if ours == other:
            continue
        if ours is not None and other is not None and ours[0] == other[0]:
            return *ours, other[1]
        # Prefer the parameter that only one side has: that is the cause.
        if other is None or (ours is not None and ours[0] not in dict(theirs)):
            assert ours is not None, "not both lists have ended"
            return *ours, _MISSING
        return other[0], _MISSING, other[1]
    return None


_MISSING = "no such parameter at this position"


def lay_out(specs: Sequence[ParamSpec], dtype: torch.dtype, aligned: bool) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    start = 0
    for spec in specs:
        slices.append(Slice(spec, start, start + spec.numel))
        start = _align(start + spec.numel, dtype, aligned)
    return tuple(slices)


def _align(numel: int, dtype: torch.dtype, aligned: bool) -> int:
    step = max(1, ALIGNMENT_BYTES // dtype.itemsize) if aligned else 1
    return -(-numel // step) * step


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(stride, shape, strict=True) if length > 1):
        if step != expected:
            return False
        expected *= length
    return True


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))
