"""
Plans the buckets: which gradient lies where in which flat buffer; made once, before any memory is taken.

    ParamSpec (name, shape, stride, dtype, device) ── plan_buckets ── BucketPlan (slices of a flat buffer)

Pure values and functions. The buffers themselves are in `bucket`; who launches them is `reducer`.
All ranks make the same plan because it depends on the specs alone, and they compare those
(`first_difference`) before the first gradient travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Slices begin at multiples of this, so that every gradient is as aligned as a tensor of its own.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the plan needs to know of a parameter.

    ``stride`` is the layout its gradient has in the bucket: the parameter's own where that is dense
    (channels_last stays channels_last), the contiguous one otherwise. ``trainable`` is whether it
    required a gradient when it was planned.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    trainable: bool

    @classmethod
    def of(cls, name: str, param: Tensor) -> ParamSpec:
        """The spec of a parameter under this name."""
        shape = tuple(param.shape)
        stride = param.stride() if is_dense(shape, param.stride()) else _contiguous_stride(shape)
        return cls(name, shape, stride, param.dtype, param.device, param.requires_grad)

    @property
    def numel(self) -> int:
        """Elements of the parameter, and of its gradient."""
        return torch.Size(self.shape).numel()

    def describe(self) -> str:
        """The spec in words, for messages; without the device's number, which may differ by rank."""
        layout = "" if self.stride == _contiguous_stride(self.shape) else f", strides {self.stride}"
        frozen = "" if self.trainable else ", frozen"
        return f"shape {self.shape}, {self.dtype}, on {self.device.type}{layout}{frozen}"


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one parameter's gradient lies in its bucket; ``start`` and ``stop`` are in elements."""

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One flat buffer: gradients first, then a tail of flags, all of one dtype on one device.

    The tail tells what all ranks must know together and would otherwise cost a collective of its own:
    for every slice how many ranks used the parameter and how many have a sparse gradient for it; how many
    sit this step out and do not count (see `join`), and how many take part, in ``count_slots`` elements; and
    (``wake_slots``, in the first bucket only) for every sleeping bucket how many ranks need it.

    A bucket of parameters that were frozen when it was planned sleeps: it takes no memory and does not
    travel until some rank has unfrozen one of them.
    """

    slices: tuple[Slice, ...]
    dtype: torch.dtype
    device: torch.device
    asleep: bool = False
    wake_slots: int = 0
    aligned: bool = True
    count_slots: int = 1

    @property
    def grad_numel(self) -> int:
        """Elements that the gradients take, with the gaps that keep them aligned."""
        return _align(self.slices[-1].stop, self.dtype, self.aligned) if self.slices else 0

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.wake_start + self.wake_slots

    @property
    def presence_start(self) -> int:
        """Where in the buffer the counts of ranks begin."""
        return self.grad_numel + 2 * len(self.slices)

    @property
    def wake_start(self) -> int:
        """Where in the buffer the calls to the sleeping buckets begin."""
        return self.presence_start + 1 + self.count_slots

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.numel * self.dtype.itemsize

    def without(self, names: set[str]) -> BucketPlan:
        """The same bucket with these parameters gone and the rest moved together."""
        kept = [piece.spec for piece in self.slices if piece.spec.name not in names]
        return replace(self, slices=_lay_out(kept, self.dtype, self.aligned))

    def describe(self) -> str:
        """The bucket by the names that it holds, for messages."""
        return f"gradients of {first_of([piece.spec.name for piece in self.slices])}"


def plan_buckets(
    specs: Sequence[ParamSpec],
    *,
    cap_bytes: int,
    groups: Iterable[Iterable[str]] = (),
    aligned: bool = True,
    count_slots: int = 1,
) -> tuple[BucketPlan, ...]:
    """Pack parameters, last first, into buckets of at most ``cap_bytes`` of gradients; 0 is a bucket for each.

    Backward computes gradients roughly from the last parameter to the first, so the first bucket is
    full first and travels while the rest is still being computed (the order of PyTorch's DDP,
    https://arxiv.org/abs/2006.15704).

    Buckets do not mix dtypes, devices, or frozen with trainable parameters; only a lone parameter may
    exceed the cap. Each of ``groups`` (names) shares a bucket however large it is, as in Horovod, one
    per dtype and device. Parameters that can have no gradient are in none. Unless they are ``aligned`` gradients have
    no gaps between them. ``count_slots`` is how many elements of a bucket count the ranks that take part.
    """
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    packed: list[tuple[list[ParamSpec], bool]] = []
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
            packed.append(([], not spec.trainable))
            filled[index] = 0
        packed[index][0].append(spec)
        filled[index] += need
    buckets = [
        BucketPlan(
            _lay_out(members, members[0].dtype, aligned),
            members[0].dtype,
            members[0].device,
            asleep,
            aligned=aligned,
            count_slots=count_slots,
        )
        for members, asleep in packed
    ]
    return _with_wake_slots(buckets)


def first_of(names: Sequence[str]) -> str:
    """The first three names, and how many more there are, for messages."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def can_have_gradient(dtype: torch.dtype) -> bool:
    """Whether a parameter of this dtype could require one: integers and booleans cannot."""
    return dtype.is_floating_point or dtype.is_complex


# A model as it is compared between ranks: every parameter's name and `ParamSpec.describe`.
Description = Sequence[tuple[str, str]]


def first_difference(mine: Description, theirs: Description) -> tuple[str, str, str] | None:
    """The first parameter that differs, as (name, mine in words, theirs in words); None if all agree."""
    for (name, ours), (other_name, other) in zip(mine, theirs, strict=False):
        if name != other_name:
            # Say it of the parameter that only one side has, if there is one: that is the cause.
            lone_is_mine = name not in dict(theirs)
            return (name, ours, _MISSING) if lone_is_mine else (other_name, _MISSING, other)
        if ours != other:
            return name, ours, other
    shared = min(len(mine), len(theirs))
    if len(mine) > shared:
        return (*mine[shared], _MISSING)
    if len(theirs) > shared:
        name, other = theirs[shared]
        return name, _MISSING, other
    return None


_MISSING = "no such parameter in this place"


def _with_wake_slots(buckets: list[BucketPlan]) -> tuple[BucketPlan, ...]:
    """Let the first bucket that always travels carry the calls that wake the sleeping ones."""
    if buckets and all(bucket.asleep for bucket in buckets):
        buckets[0] = replace(buckets[0], asleep=False)
    awake = [bucket for bucket in buckets if not bucket.asleep]
    asleep = [bucket for bucket in buckets if bucket.asleep]
    if asleep:
        awake[0] = replace(awake[0], wake_slots=len(asleep))
    return (*awake, *asleep)


def _lay_out(specs: Sequence[ParamSpec], dtype: torch.dtype, aligned: bool) -> tuple[Slice, ...]:
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
    """Whether the elements fill their memory without gaps or overlaps, in whatever order of dimensions."""
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
