"""
`OuterSteps`: after some of the optimizer's steps, an outer step that the hosts take together (`LocalSGD`, `DiLoCo`).

    step ── ... ── step: anchor - parameters ── averaged over the hosts, while `delay` more steps are taken
                   ── Nesterov's SGD steps the anchor ── parameters: a mix of the anchor and of the host's own

The anchor is what all hosts share. `outer_step` averages gradients only within this host, and calls `stepping` around
each step. Each of a host's L ranks keeps 1/L of the anchor, its velocity and the residuals, since the ranks of a host
have equal parameters; they put the parameters together in shared memory, or over the host's own engine.

Steps are counted by the calls of ``step()``, whether GradScaler skips them or not, so that all ranks come to the same
outer steps. Their order is fixed by the count alone. Every outer step begins with the ranks' counts, 16 bytes each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..buckets.exchange import Links
from ..buckets.flags import RankAndSize
from ..buckets.outer import OuterRule
from ..buckets.parameter_check import fingerprints
from ..buckets.plan import ParamSpec, first_of, plan_buckets
from ..buckets.step_trace import StepTrace
from ..calls.mismatch import name_ranks
from ..comm.flat_bytes import as_real, flat_of
from ..comm.group import Group
from ..comm.hierarchy import host_groups_of
from ..comm.work import Work
from ..compression.codecs import Codec
from ..errors import GradientError, MismatchError
from ..exchanges.residuals import OWN
from ..exchanges.stages import StageRunner
from ..log import log
from .outer_bucket import RESIDUAL, OuterBucket, Segment


class OuterSteps:
    """The outer steps of one optimizer, in one world of several hosts."""

    def __init__(
        self,
        rule: OuterRule,
        ranks: Group,
        trace: StepTrace,
        *,
        cap_bytes: int,
        compares: bool,
        is_later: bool,
    ) -> None:
        """``ranks`` are on several hosts. ``trace`` names the optimizer.

        ``compares``: at the first step, require that all hosts begin with equal parameters. ``is_later``: this rank had
        the optimizer in an earlier world. Then all ranks begin an interval with rank 0's parameters instead.
        """
        self._rule = rule
        self._ranks = ranks
        self._trace = trace
        self._cap_bytes = cap_bytes
        self._compares = compares
        self._is_later = is_later
        groups = host_groups_of(ranks.rank, ranks.hosts)
        within = (ranks.rank,) if groups is None else groups.within
        self.inner = RankAndSize(within.index(ranks.rank), len(within))
        """This rank and the number of ranks among those of its host, which average gradients in every step."""
        self._hosts = ranks.size // len(within)
        self._links: Links | None = None
        self._buckets: list[OuterBucket] = []
        self._frozen: list[tuple[str, Tensor]] = []
        # The steps of all training, and those in this world, which no checkpoint changes.
        self._steps = self._calls = 0
        self._in_flight: deque[_Launch] = deque()
        self._runner = StageRunner()
        self._has_begun = False
        self._is_shown = False
        # What `consolidate` has made for this rank's next checkpoint, until the next step.
        self._consolidated: dict[str, Any] = {}

    # -- set up by the step

    def open(self, group: Group) -> Links:
        """Opens the groups within and across hosts. Every rank must call it, and waits for all.

        Returns the links for the exchange of gradients, which has only the ranks of this host.
        """
        legs = 2 if isinstance(self._rule.compression, Codec) and self._hosts > 2 else 1
        self._links = Links.in_legs(group, legs)
        return Links(self._links.legs[0].within)

    def add(self, params: Mapping[str, Tensor], groups: Iterable[Iterable[str]]) -> None:
        """Adds parameters. They go into buckets as gradients do; frozen ones stay as they are, and are left out."""
        self._frozen += [(name, param) for name, param in params.items() if not param.requires_grad]
        specs = [ParamSpec.of(name, param) for name, param in params.items() if param.requires_grad]
        for plan in plan_buckets(specs, cap_bytes=self._cap_bytes, groups=groups, aligned=False):
            names = [piece.spec.name for piece in plan.slices]
            self._buckets.append(OuterBucket({name: params[name] for name in names}, self.inner, self._rule))

    # -- steps

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context for one step of the wrapped optimizer. At its end it begins and ends the outer steps that are due.

        Every rank must call it. It waits for other hosts only where an outer step ends.
        """
        if self._is_shown:
            raise GradientError("step() was called in `with optimizer.averaged():`: call it outside")
        self._begin()
        self._consolidated = {}
        yield
        self._steps += 1
        self._calls += 1
        with torch.no_grad():
            self._land_due()
            fragment = self._rule.fragment_due(self._steps)
            if fragment is not None:
                self._in_flight.append(self._launch(fragment))
                self._land_due()

    def _begin(self) -> None:
        """Takes the parameters for the anchor, where no checkpoint has one."""
        if self._rule.fragments > len(self._buckets):
            raise ValueError(
                f"outer={self._rule.words}: there are more fragments than buckets of parameters, "
                f"{len(self._buckets)}: use fewer fragments, or a smaller bucket_cap_mb"
            )
        is_loaded = all(bucket.anchor is not None for bucket in self._buckets)
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.begin()
        if not self._has_begun:
            self._begin_together(is_loaded)
            self._has_begun = True

    def _begin_together(self, is_loaded: bool) -> None:
        """Raises MismatchError on every rank if ranks have different counts of steps, or hosts different anchors.

        If some rank comes from an earlier world, all begin anew with rank 0's parameters instead.
        """
        group, local = self._opened().all, self.inner.size
        named = [entry for bucket in self._buckets for entry in bucket.by_name(bucket.start, bucket.known_anchor)]
        prints = fingerprints([values for _, (_, values) in named]) if self._compares else []
        names = [name for name, _ in named]
        # Without the name of the optimizer: this is signed, and ranks that come to a world by different ways may count
        # optimizers differently.
        what = "comparing the anchors of outer steps"
        own_prints = dict(zip(names, prints, strict=False))
        own = [self._steps if is_loaded else -1, self.inner.rank, own_prints, self._is_later]
        everyone = group.all_gather_json(own, what)
        if any(is_later for *_, is_later in everyone):
            self._begin_anew(group)
            return
        steps = [step for step, *_ in everyone]
        if len(set(steps)) > 1:
            words = ["no loaded state" if step < 0 else f"step {step}" for step in steps]
            raise MismatchError(self._words_of_steps(group, words))
        firsts: dict[int, tuple[int, dict[str, str]]] = {}
        for rank, (_, local_rank, found, _) in enumerate(everyone):
            first, expected = firsts.setdefault(local_rank, (rank, found))
            differing = [name for name, each in expected.items() if found.get(name) != each]
            if differing:
                kind = "the loaded anchor of parameter" if is_loaded else "parameter"
                raise MismatchError(
                    f"outer={self._rule.words}: {kind} {differing[0]!r} differs between "
                    f"{group.describe_rank(first)} and {group.describe_rank(rank)}, and hosts must begin with the "
                    f"same ({len(differing)} of {len(named)} differ{'' if local == 1 else ' in their parts'}). "
                    + (
                        "Load on every rank its own checkpoint, all of the same step"
                        if is_loaded
                        else "Before the first step call hvd.broadcast_parameters(model.state_dict(), root_rank=0) on "
                        "every rank"
                    )
                )

    def _begin_anew(self, group: Group) -> None:
        """Gives all ranks the parameters of rank 0, and begins an interval with them."""
        self.load_state_dict({})
        with torch.no_grad():
            for bucket in self._buckets:
                flat = as_real(flat_of(list(bucket.params.values())))
                group.broadcast(flat, 0, f"the parameters {first_of(list(bucket.params))} in a new world").wait()
                bucket.write(flat)
                bucket.begin()

    def _words_of_steps(self, group: Group, words: Sequence[str]) -> str:
        """Returns the message for ranks at different steps; ``words`` say at which each of the group's ranks is."""
        hosts = dict(zip(group.ranks, group.hosts, strict=True))
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(words):
            ranks_of.setdefault(each, []).append(group.ranks[rank])
        counts = "; ".join(f"{name_ranks(ranks, hosts)}: {each}" for each, ranks in ranks_of.items())
        return (
            f"outer={self._rule.words}: the ranks are at different steps: {counts}. Every rank must call step() "
            "equally often, and load its own checkpoint of the same step. Or delete the key 'outer' of "
            "state_dict()['hvdlite'] on every rank, to begin anew from equal parameters"
        )

    def _launch(self, fragment: int) -> _Launch:
        for name, param in self._frozen:
            if param.requires_grad:
                raise GradientError(
                    f"outer={self._rule.words}: parameter {name!r} was frozen when the optimizer was made, and is "
                    "trained now, but its changes would stay on their host: make a new DistributedOptimizer"
                )
        links, rule = self._opened(), self._rule
        buckets = self._buckets[fragment :: rule.fragments]
        names = first_of([name for bucket in buckets for name in bucket.params])
        which = f"fragment {fragment + 1} of {rule.fragments}, step {self._steps}, {self._trace.optimizer}"
        what = f"the average of the outer gradients of {names} ({which})"
        own = torch.tensor([self._steps, self._calls], dtype=torch.int64, device="cpu")
        counts, counting = links.all.begin_all_gather(
            own, f"the step counts before {what}", [own.nbytes] * links.all.size
        )
        across = [leg.across for leg in links.legs]

        def require_same_step() -> None:
            pairs = [tuple(count.view(torch.int64).tolist()) for count in counts]
            if len(set(pairs)) > 1:
                words = [f"step {steps}, after {calls} calls of step()" for steps, calls in pairs]
                raise MismatchError(self._words_of_steps(links.all, words))

        def stages(bucket: OuterBucket, values: Tensor) -> Iterator[Work]:
            yield counting
            require_same_step()
            yield from bucket.average(values, across, what)

        launch = _Launch(fragment, self._steps + rule.delay)
        for bucket in buckets:
            values = bucket.outer_gradient()
            launch.add(bucket, values, self._start(stages(bucket, values), values.device, what))
        return launch

    def _start(self, stages: Iterator[Work], device: torch.device, what: str) -> _Waits:
        if device.type == "cpu":
            return self._opened().all.watched(self._runner.start(stages), what)
        return _OnStream(stages, device)

    def _land_due(self) -> None:
        while self._in_flight and self._in_flight[0].due <= self._steps:
            launch = self._in_flight[0]
            launch.wait()
            for bucket, average in launch.averages:
                bucket.step(average)
                self._write(bucket, bucket.merged())
            self._in_flight.popleft()

    def _write(self, bucket: OuterBucket, shard: Tensor) -> None:
        """Sets the bucket's parameters, of which this rank has a shard."""
        bucket.write(self._whole(bucket, shard))

    def _whole(self, bucket: OuterBucket, shard: Tensor) -> Tensor:
        """Returns the shards of all ranks of this host as one tensor."""
        if self.inner.size == 1:
            return shard
        within = self._opened().legs[0].within
        counts = [(stop - start) * shard.element_size() for start, stop in bucket.spans]
        parts = within.all_gather(shard, f"the parameters of {first_of(list(bucket.params))}", counts)
        return torch.cat([part.view(shard.dtype) for part in parts])

    def _opened(self) -> Links:
        assert self._links is not None, "the first step has opened them"
        return self._links

    def is_sending(self) -> bool:
        """Whether collectives may be running."""
        return not all(launch.is_completed() for launch in list(self._in_flight))

    # -- what others see

    @property
    def must_open(self) -> bool:
        """Whether `showing_anchor` needs links that are not open yet: those to the other ranks of this host."""
        has_anchor = any(bucket.anchor is not None for bucket in self._buckets)
        return self._links is None and self.inner.size > 1 and has_anchor

    @contextmanager
    def showing_anchor(self) -> Iterator[None]:
        """A context in which the parameters are the anchor, equal on all ranks.

        Parameters without an anchor (never stepped, and in no checkpoint) stay as they are. The ranks of a host must
        call it together. It waits for no other host.
        """
        buckets = [bucket for bucket in self._buckets if bucket.anchor is not None]
        if self._is_shown or not buckets:
            yield
            return
        before = [flat_of(list(bucket.params.values())) for bucket in buckets]
        self._is_shown = True
        try:
            with torch.no_grad():
                for bucket in buckets:
                    self._write(bucket, bucket.known_anchor.to(bucket.dtype))
            yield
        finally:
            self._is_shown = False
            with torch.no_grad():
                for bucket, flat in zip(buckets, before, strict=True):
                    bucket.write(as_real(flat))

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's part of the state, by the names of parameters. Empty before the first step.

        Waits until outer gradients that are on their way have arrived.
        """
        if self._consolidated or not self._is_to_be_saved():
            return self._consolidated
        segments = {
            bucket: {kind: (start, values.clone()) for kind, (start, values) in bucket.state_dict().items()}
            for bucket in self._buckets
        }
        averages = [
            {bucket: (bucket.start, average.clone()) for bucket, average in launch.averages}
            for launch in self._in_flight
        ]
        return self._state_of([self._hosts, self.inner.size], segments, averages)

    def consolidate(self, *, keeps: bool) -> None:
        """Makes the next `state_dict` one that any number of ranks can load, where ``keeps``. All ranks call it.

        What codecs have kept on each host is replaced by its mean over the hosts. It waits for all.
        """
        if not self._is_to_be_saved():
            return
        segments = {}
        for bucket in self._buckets:
            kinds = {kind: (0, self._whole(bucket, values)) for kind, values in bucket.shared()}
            mean = bucket.sum_of_residuals()
            if mean is not None:
                what = f"what is kept of the outer gradients of {first_of(list(bucket.params))}"
                self._opened().all.all_reduce(mean, what).wait()
                kinds[f"{RESIDUAL}{OWN}"] = 0, mean.div_(self._hosts)
            segments[bucket] = kinds
        averages = [
            {bucket: (0, self._whole(bucket, average)) for bucket, average in launch.averages}
            for launch in self._in_flight
        ]
        self._consolidated = self._state_of(None, segments, averages) if keeps else {}

    def _is_to_be_saved(self) -> bool:
        """Whether there is a state. If so, brings it to rest: waits for what is on its way."""
        if all(bucket.anchor is None for bucket in self._buckets):
            return False
        with torch.no_grad():
            for bucket in self._buckets:
                # Of parameters that have been added since the last step.
                bucket.begin()
        for launch in self._in_flight:
            launch.wait()
        return True

    def _state_of(
        self,
        ranks: list[int] | None,
        segments: Mapping[OuterBucket, Mapping[str, Segment]],
        averages: Sequence[Mapping[OuterBucket, Segment]],
    ) -> dict[str, Any]:
        """Returns the state dict. ``ranks`` are the numbers of hosts and of ranks on each; None: for any number."""
        parameters: dict[str, dict[str, Segment]] = {}
        for bucket, kinds in segments.items():
            for kind, segment in kinds.items():
                for name, own in bucket.by_name(*segment):
                    parameters.setdefault(name, {})[kind] = own
        return {
            "outer": self._rule.words,
            "steps": self._steps,
            "ranks": ranks,
            "numels": self._numels(),
            "buckets": self._names(self._buckets),
            "parameters": parameters,
            "in_flight": [
                {
                    "fragment": launch.fragment,
                    "due": launch.due,
                    "averages": dict(own for bucket, segment in found.items() for own in bucket.by_name(*segment)),
                }
                for launch, found in zip(self._in_flight, averages, strict=True)
            ],
        }

    def _numels(self) -> dict[str, int]:
        return {name: param.numel() for bucket in self._buckets for name, param in bucket.params.items()}

    @staticmethod
    def _names(buckets: Iterable[OuterBucket]) -> list[list[str]]:
        return [list(bucket.params) for bucket in buckets]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a dict that `state_dict` returned on this rank; with an empty one the next step begins an interval.

        Raises ValueError for a state of other arguments or another model. Waits for no other rank.
        """
        self._consolidated = {}
        if state and self._is_later and state["ranks"] not in (None, [self._hosts, self.inner.size]):
            log.info("outer=%s: the state is of other hosts, in an earlier world: an interval begins", self._rule.words)
            state = {}
        if not state:
            self._give_up_in_flight()
            self._steps = 0
            for bucket in self._buckets:
                bucket.reset()
            return
        self._require_fits(state)
        self._give_up_in_flight()
        self._steps = state["steps"]
        for bucket in self._buckets:
            bucket.load_state_dict(state["parameters"])
        for each in state["in_flight"]:
            launch = _Launch(each["fragment"], each["due"])
            for bucket in self._buckets[launch.fragment :: self._rule.fragments]:
                _, average = bucket.own_part(each["averages"])
                launch.add(bucket, average, None)
            self._in_flight.append(launch)

    def _give_up_in_flight(self) -> None:
        """Drops averages that are on their way. It waits for no other rank."""
        for launch in self._in_flight:
            launch.give_up()
        self._in_flight.clear()

    def _require_fits(self, state: Mapping[str, Any]) -> None:
        way_out = "or delete the key 'outer' of state_dict()['hvdlite'] on every rank, to begin anew"
        if state["outer"] != self._rule.words:
            raise ValueError(
                f"the checkpoint is of outer={state['outer']}, and the optimizer has outer={self._rule.words}: make "
                f"it with the same, {way_out}"
            )
        if state["ranks"] not in (None, [self._hosts, self.inner.size]):
            hosts, local_size = state["ranks"]
            raise ValueError(
                f"the checkpoint's outer state is of {hosts} hosts with {local_size} ranks each, and there are "
                f"{self._hosts} with {self.inner.size}: call consolidate_state_dict before saving, {way_out}"
            )
        own = self._numels()
        if state["numels"] != own:
            differing = min(name for name, _ in state["numels"].items() ^ own.items())
            raise ValueError(
                f"the checkpoint's outer state is of another model: it differs in parameter {differing!r}: build the "
                f"same model, {way_out}"
            )
        if self._is_of_other_buckets(state):
            consolidated = "" if state["ranks"] is None else ", or call consolidate_state_dict before saving"
            raise ValueError(
                "the checkpoint's outer state is of other buckets: use the same bucket_cap_mb and groups"
                f"{consolidated}, {way_out}"
            )

    def _is_of_other_buckets(self, state: Mapping[str, Any]) -> bool:
        """Whether what a state of the same model has does not make up what this rank needs of its own buckets."""
        before = state.get("buckets")
        if before is None:
            # It was saved before there was this key.
            return False
        own = self._names(self._buckets)
        if before == own:
            return False
        if state["ranks"] is not None and self.inner.size > 1:
            # A rank has a shard of each bucket.
            return True
        # All is there, but a bucket is stepped as a whole.
        count = self._rule.fragments
        return any(
            {name for names in before[turn::count] for name in names}
            != {name for names in own[turn::count] for name in names}
            for turn in (each["fragment"] for each in state["in_flight"])
        )


class _Waits(Protocol):
    """What a launched average is waited for by: a `Work`, or a stream of the GPU."""

    def wait(self) -> None: ...
    def is_completed(self) -> bool: ...


class _Launch:
    """The averages of one fragment's outer gradients, on their way."""

    def __init__(self, fragment: int, due: int) -> None:
        """``due`` is the count of steps after which the outer step is taken."""
        self.fragment = fragment
        self.due = due
        self.averages: list[tuple[OuterBucket, Tensor]] = []
        self._works: list[_Waits] = []

    def add(self, bucket: OuterBucket, average: Tensor, work: _Waits | None) -> None:
        """Adds a bucket's average, which is there once ``work`` is done, or now."""
        self.averages.append((bucket, average))
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        """Blocks until all averages are there."""
        for work in self._works:
            work.wait()

    def give_up(self) -> None:
        """Lets the memory of the averages be used for something else."""
        for work in self._works:
            if isinstance(work, _OnStream):
                # A stream that goes on would write into memory that this one has been given again.
                work.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)


class _OnStream:
    """Stages on a GPU, on a stream of their own, beside the steps that are taken meanwhile."""

    def __init__(self, stages: Iterator[Work], device: torch.device) -> None:
        self._device = device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for work in stages:
                work.wait()
            self._end = stream.record_event()

    def wait(self) -> None:
        """Has the current stream wait; the program goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def is_completed(self) -> bool:
        """Whether the device has got to the end of the stages."""
        return bool(self._end.query())
