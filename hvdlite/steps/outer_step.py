"""
`OuterStep`: averages gradients within each host, and has hosts take an outer step together after some steps.

    step ── ... ── step: anchor - parameters ── averaged over the hosts, while `delay` more steps are taken
                   ── Nesterov's SGD steps the anchor ── parameters: a mix of the anchor and of the host's own

The anchor is what all hosts share (`LocalSGD`, `DiLoCo`). Each of a host's L ranks keeps 1/L of the anchor, its
velocity and the residuals, since the ranks of a host have equal parameters; they put the parameters together in shared
memory, or over the host's own engine.

Steps are counted by the calls of ``step()``, whether GradScaler skips them or not, so that all ranks come to the same
outer steps. Their order is fixed by the count alone. Every outer step begins with the ranks' counts, 16 bytes each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..buckets.exchange import Links
from ..buckets.flags import RankAndSize
from ..buckets.parameter_check import fingerprints
from ..buckets.plan import Description, ParamSpec, first_of, plan_buckets
from ..buckets.settings import OuterRule
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
from .averaged_step import AveragedStep, WrappingStep
from .outer_bucket import RESIDUAL, Launch, OuterBucket, Segment, StreamWork
from .step_world import Added, StepWorld


def ranks_of_host(ranks: Group) -> RankAndSize:
    """Returns this rank and the number of ranks among those of its host, which average gradients in every step."""
    groups = host_groups_of(ranks.rank, ranks.hosts)
    within = (ranks.rank,) if groups is None else groups.within
    return RankAndSize(within.index(ranks.rank), len(within))


class OuterStep(WrappingStep):
    """Steps of several hosts that train apart, and average their parameters after some of them.

    A rank that had the optimizer in an earlier world begins an interval with rank 0's parameters, and so do all.
    """

    def __init__(self, inner: AveragedStep, rule: OuterRule, world: StepWorld) -> None:
        super().__init__(inner, world)
        self._rule = rule
        self._local = inner.plan.ranks
        self._hosts = world.ranks.size // self._local.size
        # Those over all hosts, once they are open: a list, since what opens them must not refer to the optimizer.
        self._links: list[Links] = []
        self._buckets: list[OuterBucket] = []
        self._frozen: list[tuple[str, Tensor]] = []
        # The steps of all training, and those in this world, which no checkpoint changes.
        self._steps = self._calls = 0
        self._in_flight: deque[Launch] = deque()
        self._runner = StageRunner()
        self._has_begun = False
        self._is_shown = False
        # What `consolidate` has made for this rank's next checkpoint, until the next step.
        self._consolidated: dict[str, Any] = {}

    # -- parameters

    def add(self, added: Added) -> Description:
        """Adds parameters. They go into buckets as gradients do; frozen ones stay as they are, and are left out."""
        params = added.params
        self._frozen += [(name, param) for name, param in params.items() if not param.requires_grad]
        specs = [ParamSpec.of(name, param) for name, param in params.items() if param.requires_grad]
        cap_bytes = self._world.settings.cap_bytes
        for plan in plan_buckets(specs, cap_bytes=cap_bytes, groups=added.groups, aligned=False):
            names = [piece.spec.name for piece in plan.slices]
            self._buckets.append(OuterBucket({name: params[name] for name in names}, self._local, self._rule))
        return self._inner.add(added)

    def drop_params(self, names: Collection[str]) -> None:
        """Raises GradientError, since the anchor has the values of these parameters."""
        raise GradientError(
            f"parameter {next(iter(names))!r} has left optimizer.param_groups, and outer={self._rule.words} has its "
            "value of the last outer step: make a new DistributedOptimizer on every rank"
        )

    # -- the engine

    @property
    def open_links(self) -> Callable[[Group], Links]:
        return partial(_open, self._links, 2 if isinstance(self._rule.compression, Codec) and self._hosts > 2 else 1)

    def _opened(self) -> Links:
        assert self._links, "the first step has opened them"
        return self._links[0]

    @property
    def is_sending(self) -> bool:
        return self._inner.is_sending or not all(launch.is_completed() for launch in list(self._in_flight))

    # -- around the optimizer's own step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context for the optimizer's own step. At its end it begins and ends the outer steps that are due.

        Every rank must call it. It waits for other hosts only where an outer step ends.
        """
        self._world.engine.require_usable()
        self._world.engine.connected()
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
                self._in_flight.append(self._send(fragment))
                self._land_due()

    def why_no_join(self) -> str:
        return (
            f"hvd.join() does not work with outer={self._rule.words}: hosts take outer steps together, and one that "
            "has joined would not come to them. Give every rank as many batches, for example with drop_last=True in "
            "its sampler"
        )

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
        group, local = self._opened().all, self._local.size
        named = [entry for bucket in self._buckets for entry in bucket.by_name(bucket.start, bucket.known_anchor)]
        prints = fingerprints([values for _, (_, values) in named]) if self._world.compares else []
        names = [name for name, _ in named]
        # Without the name of the optimizer: this is signed, and ranks that come to a world by different ways may count
        # optimizers differently.
        what = "comparing the anchors of outer steps"
        own_prints = dict(zip(names, prints, strict=False))
        own = [self._steps if is_loaded else -1, self._local.rank, own_prints, self._world.worlds > 0]
        everyone = group.all_gather_json(own, what)
        if any(is_later for *_, is_later in everyone):
            self._begin_anew(group)
            return
        steps = [step for step, *_ in everyone]
        if len(set(steps)) > 1:
            words = ["no loaded state" if step < 0 else f"step {step}" for step in steps]
            _refuse_steps(group, self._rule.words, words)
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
        self.load_state_dict({})
        with torch.no_grad():
            for bucket in self._buckets:
                flat = as_real(flat_of(list(bucket.params.values())))
                group.broadcast(flat, 0, f"the parameters {first_of(list(bucket.params))} in a new world").wait()
                bucket.write(flat)
                bucket.begin()

    def _send(self, fragment: int) -> Launch:
        for name, param in self._frozen:
            if param.requires_grad:
                raise GradientError(
                    f"outer={self._rule.words}: parameter {name!r} was frozen when the optimizer was made, and is "
                    "trained now, but its changes would stay on their host: make a new DistributedOptimizer"
                )
        links, rule = self._opened(), self._rule
        buckets = self._buckets[fragment :: rule.fragments]
        names = first_of([name for bucket in buckets for name in bucket.params])
        which = f"fragment {fragment + 1} of {rule.fragments}, step {self._steps}, {self._world.trace.optimizer}"
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
                _refuse_steps(links.all, rule.words, words)

        def stages(bucket: OuterBucket, values: Tensor) -> Iterator[Work]:
            yield counting
            require_same_step()
            yield from bucket.average(values, across, what)

        launch = Launch(fragment, self._steps + rule.delay)
        for bucket in buckets:
            values = bucket.outer_gradient()
            launch.averages.append((bucket, values))
            on_cpu = values.device.type == "cpu"
            start = stages(bucket, values)
            work = links.all.watched(self._runner.start(start), what) if on_cpu else StreamWork(start, values.device)
            launch.works.append(work)
        return launch

    def _land_due(self) -> None:
        while self._in_flight and self._in_flight[0].due <= self._steps:
            launch = self._in_flight[0]
            launch.wait()
            for bucket, average in launch.averages:
                bucket.step(average)
                bucket.write(self._whole(bucket, bucket.merged()))
            self._in_flight.popleft()

    def _whole(self, bucket: OuterBucket, shard: Tensor) -> Tensor:
        if self._local.size == 1:
            return shard
        within = self._opened().legs[0].within
        counts = [(stop - start) * shard.element_size() for start, stop in bucket.spans]
        parts = within.all_gather(shard, f"the parameters of {first_of(list(bucket.params))}", counts)
        return torch.cat([part.view(shard.dtype) for part in parts])

    # -- what outlives it

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the parameters that have an anchor are that. The ranks of a host must call it together."""
        engine = self._world.engine
        engine.require_own("optimizer.averaged()")
        buckets = [bucket for bucket in self._buckets if bucket.anchor is not None]
        if buckets and not self._links and self._local.size > 1:
            engine.connected()
        if self._is_shown or not buckets:
            yield
            return
        before = [flat_of(list(bucket.params.values())) for bucket in buckets]
        self._is_shown = True
        try:
            with torch.no_grad():
                for bucket in buckets:
                    bucket.write(self._whole(bucket, bucket.known_anchor.to(bucket.dtype)))
            yield
        finally:
            self._is_shown = False
            with torch.no_grad():
                for bucket, flat in zip(buckets, before, strict=True):
                    bucket.write(as_real(flat))

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's part of the state, once what is on its way has arrived."""
        self._world.engine.require_own("optimizer.state_dict() with outer=")
        if self._consolidated or not self._is_to_be_saved():
            return self._consolidated
        segments = {
            bucket: {kind: (start, values.clone()) for kind, (start, values) in bucket.state_dict().items()}
            for bucket in self._buckets
        }
        ranks = [self._hosts, self._local.size]
        return self._state_of(ranks, segments, lambda bucket, average: (bucket.start, average.clone()))

    def consolidate(self, *, keeps: bool) -> None:
        """Makes the next `state_dict` one for any number of ranks, with the mean of what codecs have kept."""
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
        state = self._state_of(None, segments, lambda bucket, average: (0, self._whole(bucket, average)))
        self._consolidated = state if keeps else {}

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
        of_average: Callable[[OuterBucket, Tensor], Segment],
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
            "numels": _numels(self._buckets),
            "buckets": _names(self._buckets),
            "parameters": parameters,
            "in_flight": [
                {
                    "fragment": launch.fragment,
                    "due": launch.due,
                    "averages": dict(
                        own
                        for bucket, average in launch.averages
                        for own in bucket.by_name(*of_average(bucket, average))
                    ),
                }
                for launch in self._in_flight
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned on this rank; with an empty one the next step begins an interval.

        Raises ValueError for a state of other arguments or another model.
        """
        self._consolidated = {}
        if state and self._world.worlds > 0 and state["ranks"] not in (None, [self._hosts, self._local.size]):
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
            launch = Launch(each["fragment"], each["due"])
            for bucket in self._buckets[launch.fragment :: self._rule.fragments]:
                _, average = bucket.own_part(each["averages"])
                launch.averages.append((bucket, average))
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
        if state["ranks"] not in (None, [self._hosts, self._local.size]):
            hosts, local_size = state["ranks"]
            raise ValueError(
                f"the checkpoint's outer state is of {hosts} hosts with {local_size} ranks each, and there are "
                f"{self._hosts} with {self._local.size}: call consolidate_state_dict before saving, {way_out}"
            )
        own = _numels(self._buckets)
        if state["numels"] != own:
            differing = min(name for name, _ in state["numels"].items() ^ own.items())
            raise ValueError(
                f"the checkpoint's outer state is of another model: it differs in parameter {differing!r}: build the "
                f"same model, {way_out}"
            )
        # A rank has a shard of each bucket, and what is on its way is stepped by whole buckets.
        needs_same = state["in_flight"] or (state["ranks"] is not None and self._local.size > 1)
        if needs_same and state["buckets"] != _names(self._buckets):
            consolidated = "" if state["ranks"] is None else ", or call consolidate_state_dict before saving"
            raise ValueError(
                "the checkpoint's outer state is of other buckets: use the same bucket_cap_mb and groups"
                f"{consolidated}, {way_out}"
            )


def _open(opened: list[Links], legs: int, group: Group) -> Links:
    """Opens the groups within and across hosts, on all ranks. Returns the links among the ranks of this host."""
    opened[:] = [Links.in_legs(group, legs)]
    return Links(opened[0].legs[0].within)


def _numels(buckets: Sequence[OuterBucket]) -> dict[str, int]:
    return {name: param.numel() for bucket in buckets for name, param in bucket.params.items()}


def _names(buckets: Sequence[OuterBucket]) -> list[list[str]]:
    return [list(bucket.params) for bucket in buckets]


def _refuse_steps(group: Group, outer: str, words: Sequence[str]) -> NoReturn:
    """Raises the error of ranks at different steps; ``words`` say at which each of the group's ranks is."""
    hosts = dict(zip(group.ranks, group.hosts, strict=True))
    ranks_of: dict[str, list[int]] = {}
    for rank, each in enumerate(words):
        ranks_of.setdefault(each, []).append(group.ranks[rank])
    counts = "; ".join(f"{name_ranks(ranks, hosts)}: {each}" for each, ranks in ranks_of.items())
    raise MismatchError(
        f"outer={outer}: the ranks are at different steps: {counts}. Every rank must call step() "
        "equally often, and load its own checkpoint of the same step. Or delete the key 'outer' of "
        "state_dict()['hvdlite'] on every rank, to begin anew from equal parameters"
    )
