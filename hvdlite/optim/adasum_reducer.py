"""
Adasum in an optimizer: each rank takes its own step, and what the steps changed is combined.

    parameters ── copied ── the optimizer's own step, with this rank's gradients ── difference: the delta
               ── compress ── Adasum of all ranks' deltas ── decompress ── added to the copies ── parameters

For an optimizer, this takes the place of `reducer`, which combines gradients. The deltas travel in buckets as
gradients do, one after the other, since none is there before the step; a bucket that no rank has a gradient for does
not travel. They are dense, also where gradients are sparse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..comm.flat_bytes import flat_of, pieces_of
from ..comm.group import Group
from ..comm.reduce_op import Adasum
from ..compression.custom import CustomCompression
from ..ops.failures import raise_together
from ..ops.packing import PackedTensors, put_back
from ..ops.reduction import Reduction
from .gradient_hooks import GradientHooks, number_of_backward, too_many_passes
from .plan import ParamSpec, plan_buckets
from .wire import Settings, as_real


class AdasumReducer(GradientHooks):
    """Combines what the steps of an optimizer change on the ranks of a group.

    All ranks must take equally many steps. Their parameters, if equal before the first, are equal after each.
    """

    def __init__(
        self,
        group: Group,
        settings: Settings,
        backward_passes_per_step: int = 1,
        *,
        check_parameters: bool | int = False,
    ) -> None:
        """``check_parameters`` is as of `sameness.ParameterCheck`."""
        super().__init__(group, settings, backward_passes_per_step, check_parameters)
        self._buckets: list[_Bucket] = []
        self._name_of: dict[Tensor, str] = {}
        self._passes: dict[Tensor, int] = {}

    def add_params(self, named_params: Iterable[tuple[str, Tensor]], groups: Iterable[Iterable[str]] = ()) -> None:
        """Take in parameters, after those there are."""
        params = dict(named_params)
        specs = [ParamSpec.of(name, param) for name, param in params.items()]
        for plan in plan_buckets(specs, cap_bytes=self.settings.cap_bytes, groups=groups):
            members = [params[piece.spec.name] for piece in plan.slices]
            self._buckets.append(_Bucket(members, plan.describe().replace("gradients of", "the deltas of", 1)))
        self._name_of.update((param, name) for name, param in params.items())
        self._hear(params, [(spec.name, spec.describe()) for spec in specs])

    # -- backward passes, which here are only counted

    def _on_gradient(self, param: Tensor) -> None:
        self._backwards.add(number_of_backward())
        if self._only_accumulating or self._is_closed:
            return
        passes = self._passes[param] = self._passes.get(param, 0) + 1
        if passes > self.backward_passes_per_step:
            raise too_many_passes(self._name_of[param], self.backward_passes_per_step)

    @property
    def has_arrivals(self) -> bool:
        """False: gradients stay where they are."""
        return False

    def passes_of(self) -> dict[Tensor, int]:
        """The backward passes that have added to each gradient since the last step, where there were any."""
        return dict(self._passes)

    def synchronize(self) -> None:
        """Nothing: each rank steps with its own gradients."""

    def require_nothing_pending(self, action: str, way_out: str) -> None:
        """Nothing is under way between two steps; what was accumulated is about to be dropped."""
        self._passes.clear()
        self._backwards.clear()

    # -- the step

    def require_sound(self) -> None:
        """Nothing: a backward pass too many changes what this rank's step uses, and nothing on its way."""

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Divide the gradients by GradScaler's scale, unless some rank has found one that is not finite.

        Then none steps. Every rank must call it before `stepping`, with None where there is no GradScaler.
        """
        self._require_not_closed()
        self._passes.clear()
        _, overflows = self._count([1, 0 if found_inf is None else int(found_inf.item() > 0)])
        if overflows:
            return False
        if grad_scale is not None:
            inverse = 1.0 / float(grad_scale)
            for param in self._name_of:
                if param.grad is not None:
                    param.grad.mul_(inverse)
        return True

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let the wrapped optimizer step inside; then combine what that has changed."""
        if self.size > 1:
            self._compare(takes_part=True)
            for bucket in self._buckets:
                bucket.remember()
        yield
        if self.size > 1:
            self._combine()
        self._backwards.clear()
        self._tracks.stepped()

    def sit_out(self, average_of_active: bool) -> bool:
        """Take part in one step of the other ranks with nothing to give; False if they all sat out as well.

        For `join`. The parameters become what theirs become.
        """
        active, overflows = self._count([0, 0])
        if active and not overflows:
            self._compare(takes_part=False)
            for param in self._name_of:
                param.grad = None
            self._combine()
        return active > 0

    def _compare(self, *, takes_part: bool) -> None:
        group = self.meet()
        self._check.begin(takes_part=takes_part)
        self._check.send(group)
        self._check.finish(group)

    def _combine(self) -> None:
        group = self.meet()
        needed = self._count([bucket.has_gradients for bucket in self._buckets])
        with self._tracks.synchronizing():
            for place, (bucket, count) in enumerate(zip(self._buckets, needed, strict=True)):
                if count:
                    with self._tracks.combining(place, bucket.what):
                        bucket.combine(group, self.settings, self._tracks.name_of(place))
                bucket.forget()

    def _count(self, own: Sequence[int]) -> list[int]:
        """The sums over all ranks."""
        counts = torch.tensor(own, dtype=torch.int32)
        if self.size > 1:
            self.meet().all_reduce(counts, f"an Adasum step of {self._tracks.optimizer}").wait()
        return [int(count) for count in counts.tolist()]


class _Bucket:
    """Parameters of one dtype and device whose deltas travel together."""

    def __init__(self, params: Sequence[Tensor], what: str) -> None:
        self._params = params
        self.what = f"the Adasum of {what}"
        self._before: Tensor | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether this rank's step may have changed it."""
        return any(param.grad is not None for param in self._params)

    def remember(self) -> None:
        """Copy the parameters, before a step."""
        if any(param.requires_grad or param.grad is not None for param in self._params):
            self._before = flat_of(self._params)

    def forget(self) -> None:
        """Give the copies back."""
        self._before = None

    @torch.no_grad()
    def combine(self, group: Group, settings: Settings, name: str) -> None:
        """Make of the parameters what they were, and the Adasum of what the ranks have added to them since.

        ``name`` is the bucket's, by which errors and stalls tell it from others.
        """
        before = flat_of(self._params) if self._before is None else self._before
        delta = flat_of(self._params).sub_(before)
        counts, what = [param.numel() for param in self._params], f"{self.what} ({name})"
        if isinstance(settings.compression, CustomCompression):
            tensors = [as_real(delta)]
            if settings.compression.takes_each:
                pieces = zip(pieces_of(delta, counts), self._params, strict=True)
                tensors = [piece.view(param.shape) for piece, param in pieces]
            combine_packed(group, settings.compression, tensors, counts, what)
        else:
            Reduction(settings.op, compression=settings.compression).all_reduce(group, delta, counts, 1, what)
        after = before.add_(delta)
        start = 0
        for param in self._params:
            param.copy_(after[start : start + param.numel()].view(param.shape))
            start += param.numel()


def combine_packed(
    group: Group, compression: CustomCompression, tensors: Sequence[Tensor], counts: Sequence[int], what: str
) -> None:
    """Replace deltas by the Adasum of all ranks', packed by a compression of the user's own.

    ``tensors`` are either those of each parameter or a flat one of all; ``counts`` are the parameters' elements.
    """

    reduction = Reduction(Adasum)

    def check(tensor: Tensor, wire: Tensor, of: str) -> None:
        is_inexact = wire.is_floating_point() or wire.is_complex()
        if is_inexact:
            reduction.check_dtype(wire, of)
        if not is_inexact or _reals(wire) != _reals(tensor):
            raise ValueError(
                f"op=hvd.Adasum: {of}: {compression!r} makes {wire.numel()} numbers of {wire.dtype} out of "
                f"{tensor.numel()} of {tensor.dtype}: use one that keeps each number a floating-point number of its own"
            )

    pack = PackedTensors(compression, tensors, [what] * len(tensors), check)
    raise_together(group, pack.failure, what, layout=pack.layout)
    for flat, own_counts, packed in pack.flats():
        of_params = own_counts if len(tensors) > 1 else [count * flat.numel() // sum(counts) for count in counts]
        reduction.all_reduce(group, flat, of_params, 1, what)
        put_back(flat, own_counts, packed)
    pack.unpack()
    raise_together(group, pack.failure, f"the end of {what}")


def _reals(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)
