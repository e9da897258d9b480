"""
Gradients in, averaged gradients out.

    hook(param) ── slice of a bucket ── compress ── all-reduce ──┐      inside backward
    step        ── wait, in plan order ── decompress ── param.grad      inside synchronize

A gradient lives in a *slice* of a *bucket*; a full bucket becomes a *wire*, and the sum of all ranks'
wires, scaled, is the *average*. A parameter has *arrived* when its gradient is complete for this step,
that is after `backward_passes_per_step` backward passes.

What lies where is decided in `plan`; sparse gradients take the way of `sparse`. Whether a user's calls
come in an order that loses nothing is checked here, since only here is known what is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .bucket import Bucket, Slot
from .collective import Average, Group, ReduceOp
from .compression import Compressor
from .errors import GradientError, MismatchError
from .plan import BucketPlan, Description, ParamSpec, first_difference, plan_buckets
from .sparse import SparseHome


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients are combined; the same on every rank."""

    compression: Compressor
    op: ReduceOp
    gradient_predivide_factor: float
    cap_bytes: int
    sparse_as_dense: bool

    def signature(self) -> tuple[object, ...]:
        """What two ranks compare; a compression of the user's own by its type."""
        own_words = type(self.compression).__repr__ is not object.__repr__
        compression = repr(self.compression) if own_words else type(self.compression).__qualname__
        return (compression, self.op, self.gradient_predivide_factor, self.cap_bytes, self.sparse_as_dense)

    def scales(self, size: int) -> tuple[float, float]:
        """The factors before and after the sum.

        An average is scaled before it is summed, so that it overflows no sooner than its terms do.
        """
        if self.op is not Average:
            return 1.0, 1.0
        if self.gradient_predivide_factor == 1.0:
            return 1.0 / size, 1.0
        return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor / size


class InFlight:
    """The all-reduce of a bucket under way, and all that must outlive it."""

    def __init__(self, bucket: Bucket, group: Group, settings: Settings) -> None:
        self._compression = settings.compression
        before, self._after = settings.scales(group.size)
        self._out = _as_real(bucket.seal())
        # Held until finish(): the engine reads and writes this memory meanwhile.
        self._wire = settings.compression.compress(self._out, before)
        self._work = group.all_reduce(self._wire, f"the all-reduce of the {bucket.plan.describe()}")

    def is_completed(self) -> bool:
        """Whether `finish` would not have to wait."""
        return self._work.is_completed()

    def finish(self) -> None:
        """Block until done; leave the average in the bucket, and so in every gradient that is a view of it."""
        self._work.wait()
        self._compression.decompress(self._wire, self._out, self._after)


class Reducer:
    """Averages the gradients of some parameters over the ranks of a group.

    Knows neither optimizer nor world. `synchronize` must be called by all ranks equally often; everything
    between two of those calls may differ by rank, the parameters used and the order of their gradients
    included.
    """

    def __init__(self, group: Group, settings: Settings, backward_passes_per_step: int = 1) -> None:
        self.group = group
        self.settings = settings
        self.backward_passes_per_step = backward_passes_per_step
        self._hooks: list[RemovableHandle] = []
        # In plan order, the same on every rank, as are the sparse ones.
        self._buckets: list[Bucket] = []
        self._sparse: list[SparseHome] = []
        self._slots: dict[Tensor, Slot] = {}
        self._uncompared: list[Description] = []
        # What is under way in this step.
        self._collecting = False
        self._synchronized = False
        self._launched: list[Bucket] = []
        self._in_flight: list[InFlight] = []
        self._only_accumulating = False
        # Autograd's numbers of the backward passes since the last step.
        self._backwards: set[int] = set()

    # -- the plan

    def add_params(self, named_params: Iterable[tuple[str, Tensor]], groups: Iterable[Iterable[str]] = ()) -> None:
        """Take in parameters: plan their buckets, after those there are, and hook their gradients."""
        params = dict(named_params)
        specs = [ParamSpec.of(name, param) for name, param in params.items()]
        plans = plan_buckets(specs, cap_bytes=self.settings.cap_bytes, groups=groups)
        buckets = [self._make_bucket(plan, [params[piece.spec.name] for piece in plan.slices]) for plan in plans]
        if buckets:
            buckets[0].sleepers = [bucket for bucket in buckets if bucket.asleep]
        self._buckets += buckets
        self._hooks += [_hook(param, self._on_gradient) for param in params.values()]
        self._uncompared.append([(spec.name, spec.describe()) for spec in specs])

    def compare_with_other_ranks(self) -> None:
        """Raise a MismatchError on every rank if one has other parameters than another.

        Every rank must call it, or leave it to the first gradient. Does nothing where nothing is new.
        """
        while self._uncompared:
            descriptions = self.group.agree(self._uncompared.pop(0), "comparing the models")
            if descriptions is not None:
                raise MismatchError(_words_of_difference(descriptions, self.group))

    def close(self) -> None:
        """Remove every hook. Gradients stay where they are; what is under way is not waited for."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- inside backward

    def _on_gradient(self, param: Tensor) -> None:
        slot = self._slots[param]
        if not self._collecting:
            self._begin_step()
        elif slot.arrived:
            self._require_surplus(slot)
            self._discard()
            self._begin_step()
        self._backwards.add(torch._C._current_graph_task_id())
        if param.grad is not slot.view:
            # A gradient that was None before: what earlier passes left in it, the user has thrown away.
            slot.passes = 0
        slot.home.take(slot)
        if self._only_accumulating:
            return
        slot.passes += 1
        if slot.passes >= self.backward_passes_per_step:
            slot.home.arrive(slot)
            self._launch_full_buckets()

    def _launch_full_buckets(self) -> None:
        # In plan order, not as buckets fill: ranks may fill them in different orders, and collectives
        # pair up by the order of their launch alone.
        for bucket in self._awake()[len(self._launched) :]:
            if not bucket.full:
                break
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        self._launched.append(bucket)
        self._in_flight.append(InFlight(bucket, self.group, self.settings))
        # Those that are done give their wires back, so that memory holds few of them at a time.
        while self._in_flight[0].is_completed() and len(self._in_flight) > 1:
            self._in_flight.pop(0).finish()

    # -- between backward and step

    def synchronize(self) -> None:
        """Wait for all ranks; leave the averages in the gradients. Nothing if that has been done already.

        A parameter that no rank used keeps ``grad = None``; one that some ranks used is averaged over all
        of them, the others counting as zero.
        """
        if self._synchronized:
            return
        if not self._collecting:
            self._begin_step()
        try:
            self._reduce_everything()
            self._give_back()
        finally:
            self._end_step()
        self._synchronized = True

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        self.group.stepped_backwards.extend(self._backwards)
        self._backwards.clear()
        self._synchronized = False

    def require_nothing_pending(self, action: str, way_out: str) -> None:
        """Raise a GradientError if gradients that nobody has waited for would be lost by this action.

        Unless they are surplus (see `_is_surplus`): then wait, and drop them. A half accumulation is dropped.
        """
        if self._collecting:
            arrived = next((slot for slot in self._slots.values() if slot.arrived), None)
            if arrived is not None:
                if not self._is_surplus():
                    raise GradientError(
                        f"{action} while gradients are on their way between the ranks (the first: "
                        f"{arrived.name!r}): {way_out}"
                    )
                self._discard()
            self._end_step()
        self._backwards.clear()
        self._synchronized = False

    @property
    def has_arrivals(self) -> bool:
        """Whether some gradient is complete and has not been synchronized."""
        return self._collecting and any(slot.arrived for slot in self._slots.values())

    @contextmanager
    def only_accumulating(self) -> Iterator[None]:
        """Let backward passes inside add to the gradients, without counting and without communication."""
        earlier, self._only_accumulating = self._only_accumulating, True
        try:
            yield
        finally:
            self._only_accumulating = earlier

    # -- how it is done

    def _awake(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets if not bucket.asleep]

    def _begin_step(self) -> None:
        self.compare_with_other_ranks()
        self._collecting = True
        self._synchronized = False
        for bucket in self._buckets:
            bucket.expect()

    def _end_step(self) -> None:
        self._collecting = False
        self._launched.clear()
        self._in_flight.clear()
        for slot in self._slots.values():
            slot.forget()

    def _reduce_everything(self) -> None:
        for bucket in self._awake()[len(self._launched) :]:
            self._launch(bucket)
        self._finish_all()
        # A call to wake travels in a bucket that has just come back, so all ranks hear it at the same time.
        carriers = [bucket for bucket in self._launched if any(sleeper.asleep for sleeper in bucket.sleepers)]
        for carrier in carriers:
            for sleeper, needed in zip(carrier.sleepers, carrier.read_wake(), strict=True):
                if needed and sleeper.asleep:
                    sleeper.asleep = False
                    self._launch(sleeper)
        self._finish_all()

    def _finish_all(self) -> None:
        for in_flight in self._in_flight:
            in_flight.finish()
        self._in_flight.clear()

    def _give_back(self) -> None:
        """Set the gradients that this rank does not have but others do, and learn which are sparse."""
        for bucket in list(self._launched):
            if bucket.locally_complete:
                continue
            newly_sparse = [slot for slot, used, sparse in bucket.read_flags() if self._settle(slot, used, sparse)]
            if newly_sparse:
                self._move_out(bucket, newly_sparse)
        before, after = self.settings.scales(self.group.size)
        for home in self._sparse:
            home.reduce(self.group, before, after)

    def _settle(self, slot: Slot, used: bool, sparse: bool) -> bool:
        """Leave in one gradient what the flags of all ranks say; whether it is to be gathered instead."""
        if self.settings.sparse_as_dense:
            if sparse and slot.view is not None:
                slot.param.grad = slot.view.to_sparse(1)
            elif used and not slot.arrived:
                slot.param.grad = slot.view
            return False
        if used and sparse:
            raise MismatchError(
                f"parameter {slot.name!r} has a sparse gradient on some ranks and a dense one on others: build "
                "the same model on every rank, or wrap the optimizer with sparse_as_dense=True"
            )
        if used and not slot.arrived:
            slot.param.grad = slot.view
        return sparse

    def _move_out(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        """From now on these parameters' gradients are gathered; the bucket is planned again without them."""
        index = self._buckets.index(bucket)
        kept = [slot.param for slot in bucket.slots if slot not in slots]
        plan = bucket.plan.without({slot.name for slot in slots})
        smaller = self._make_bucket(plan, kept)
        smaller.sleepers = bucket.sleepers
        self._buckets[index : index + 1] = [smaller] if plan.numel else []
        for slot in slots:
            home = SparseHome(slot)
            slot.home, slot.view = home, None
            self._sparse.append(home)

    def _make_bucket(self, plan: BucketPlan, params: Sequence[Tensor]) -> Bucket:
        bucket = Bucket(plan, params, densify=self.settings.sparse_as_dense)
        self._slots.update((slot.param, slot) for slot in bucket.slots)
        return bucket

    def _is_surplus(self) -> bool:
        """Whether another optimizer has stepped with every backward pass that these gradients come from.

        So it is with a GAN's discriminator after the generator's step: the generator's backward passes
        through it and leaves gradients that nobody asked for.
        """
        return bool(self._backwards) and self._backwards <= set(self.group.stepped_backwards)

    def _require_surplus(self, slot: Slot) -> None:
        if not self._is_surplus():
            raise GradientError(
                f"gradients of {slot.name!r} were computed more than backward_passes_per_step="
                f"{self.backward_passes_per_step} times before step(): to accumulate over several backward "
                "passes, raise backward_passes_per_step or wrap all but the last in `with optimizer.no_sync():`"
            )

    def _discard(self) -> None:
        """Let what is under way come to its end on all ranks, and begin anew."""
        try:
            self._reduce_everything()
        finally:
            self._end_step()
            self._backwards.clear()


def _hook(param: Tensor, on_gradient: object) -> RemovableHandle:
    # Only what requires a gradient can be hooked. A frozen parameter may be unfrozen later.
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
    if frozen:
        param.requires_grad_(False)
    assert isinstance(handle, RemovableHandle), "torch returns what removes the hook"
    return handle


def _as_real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def _words_of_difference(descriptions: Sequence[Description], group: Group) -> str:
    for rank, description in enumerate(descriptions):
        difference = first_difference(descriptions[0], description)
        if difference is not None:
            name, here, there = difference
            return (
                f"parameter {name!r} has {here} on {group.describe_rank(0)} and {there} on "
                f"{group.describe_rank(rank)}: every rank must build the same model; check the arguments that "
                "size it"
            )
    raise AssertionError("called only where the descriptions differ")
