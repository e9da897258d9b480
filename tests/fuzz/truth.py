"""
`Truth`: interprets a program in one process, with torch's own optimizers, and without hvdlite.

    each rank's backward ── its gradients ── combine, when a step asks for it ── torch.optim ── parameters

It has one copy of the parameters, and the gradients of every rank, computed by autograd on that rank's part of the
batch. A step combines them in float64: None counts as zero, and where all are None the result is. So a gradient is that
of the whole batch. Before the wrapped optimizer steps, the averages are compared with those of the ranks, and those of
the ranks are used from there on, which keeps rounding from adding up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import prelude
from .known import Unsettled, leave_if_known
from .program import (
    Action,
    AddParam,
    Backward,
    Consolidate,
    Freeze,
    Join,
    Param,
    Program,
    Read,
    Reload,
    SetGrad,
    SetRate,
    Step,
    Wrapped,
    ZeroGrad,
)
from .records import Record, difference_of, difference_of_states
from .rules import Rules
from .source import rate_of
from .tolerances import Tolerance

Found = Callable[[str], None]


class Truth:
    """One process that does what some ranks, which average with each other, do together."""

    def __init__(
        self, program: Program, ranks: Sequence[int], rules: Rules, hosts: Sequence[str], found: Found
    ) -> None:
        """``hosts`` are those of the ranks. ``found`` is called with each difference."""
        self.program = program
        self.ranks = list(ranks)
        self.rules = rules
        self._found = found
        self._wrapped = program.optimizers
        # By optimizer: whether ranks divide its work, and whether there are no gradients after a step.
        self._divides = [each.sharers(hosts) > 1 for each in program.optimizers]
        self._frees = [bool(each.option("step_on_arrival")) or each.sharers(hosts) > 1 for each in program.optimizers]
        self._tolerances = [
            Tolerance(wrapped, len(set(hosts)), frees=frees)
            for wrapped, frees in zip(program.optimizers, self._frees, strict=True)
        ]
        self._kinds: dict[str, Param] = {}
        self.params: dict[str, torch.nn.Parameter] = {}
        self.grads: dict[int, dict[str, Tensor | None]] = {rank: {} for rank in ranks}
        self._frozen: dict[int, dict[str, bool]] = {rank: {} for rank in ranks}
        for number, param in enumerate(program.params):
            self._make(param, number)
        self._names = [list(wrapped.params) for wrapped in self._wrapped]
        # With Adasum each rank has its own; otherwise all have the first.
        self._inner = [self._optimizers(wrapped) for wrapped in self._wrapped]
        self._scalers = [
            None if each.scaler is None else torch.amp.GradScaler("cpu", init_scale=each.scaler, growth_interval=2)
            for each in self._wrapped
        ]
        self._schedules = [
            [
                torch.optim.lr_scheduler.StepLR(each, 1, wrapped.schedule)
                for each in inner
                if wrapped.schedule is not None
            ]
            for wrapped, inner in zip(self._wrapped, self._inner, strict=True)
        ]
        # Whether the gradients are averages already.
        self._averaged = [False] * len(self._wrapped)
        # The samples of all ranks since the last step, if losses are weighted.
        self._weight: list[int | None] = [None] * len(self._wrapped)
        # Whether the last step was taken, and not skipped by a GradScaler.
        self._is_taken = True
        # Parameters that were put into param_groups behind the wrapper, which finds them in its next step.
        self._unheard: list[set[str]] = [set() for _ in self._wrapped]
        # Whether param_groups were changed behind the wrapper since the last step.
        self._is_changed = [False] * len(self._wrapped)
        self._has_stepped = [False] * len(self._wrapped)
        self._backwards = 0
        # Of actions that change nothing there is none.
        self._interpreters: dict[type, Callable[[Any], None]] = {
            Backward: self._backward,
            ZeroGrad: self._zero_grad,
            Freeze: self._freeze,
            SetGrad: self._set_grad,
            Reload: self._reload,
            SetRate: self._set_rate,
            Read: self._read,
        }

    def _make(self, param: Param, number: int) -> None:
        self._kinds[param.name] = param
        self.params[param.name] = prelude.param(param.shape, number, param.dtype, param.kind)
        for rank in self.ranks:
            self.grads[rank][param.name] = None
            self._frozen[rank][param.name] = param.frozen

    def _optimizers(self, wrapped: Wrapped) -> list[torch.optim.Optimizer]:
        make = getattr(prelude, wrapped.kind, None) or getattr(torch.optim, wrapped.kind)
        count = len(self.ranks) if _is_adasum(wrapped) else 1
        made = []
        for _ in range(count):
            groups: list[dict[str, Any]] = []
            for place, names in enumerate(wrapped.groups):
                rate = {"lr": rate_of(wrapped, place)} if place else {}
                groups.append({"params": [self.params[name] for name in names], **rate})
            made.append(make(groups, **dict(wrapped.arguments)))
        return made

    def do(self, at: int, action: Action, record: Record | None) -> None:
        """Interprets an action; ``record`` is what its ranks have after it, if it is a step.

        Without a record, as where the ranks have raised an error, nothing is compared.
        """
        match action:
            case Step():
                self._step(action, record)
            case Join() if record is not None:
                self._join(action, record)
            case AddParam():
                self._add_param(action, at)
            case Consolidate():
                self._consolidate(action, record)
            case _:
                if (interpret := self._interpreters.get(type(action))) is not None:
                    interpret(action)

    def _among(self, ranks: Sequence[int] | None) -> list[int]:
        return self.ranks if ranks is None else [rank for rank in ranks if rank in self.ranks]

    def _optimizer_of(self, name: str) -> int | None:
        return next((of for of, names in enumerate(self._names) if name in names), None)

    # -- gradients of one rank

    def _backward(self, action: Backward) -> None:
        self._backwards += 1
        if action.weighted is not None:
            of, ns = action.weighted
            if self._weight[of] is None and any(
                self.grads[rank][name] is not None and self.grads[rank][name].abs().sum() > 0  # type: ignore[union-attr]
                for rank in self.ranks
                for name in self._names[of]
            ):
                raise Unsettled("losses with weights are added to gradients without")
            if "Compression" in str(self._wrapped[of].option("compression")) and self._has_stepped[of]:
                leave_if_known("weights in some steps, with a codec")
            self._weight[of] = (self._weight[of] or 0) + sum(ns[rank] for rank in self.ranks)
        for of, names in enumerate(self._names):
            if any(term.param in names for term in action.terms):
                if self._weight[of] is not None and (action.weighted is None or action.weighted[0] != of):
                    raise Unsettled("gradients without weights are added to losses with them")
                # A gradient that is complete has others dropped, if it is computed again.
                self.rules.require_alike(self.ranks, of)
                terms = [term for term in action.terms if term.param in names]
                reached = [rank for rank in self.ranks if any(rank in (term.ranks or self.ranks) for term in terms)]
                self.rules.require_reached(reached, self.ranks, of)
        for rank in self.ranks:
            self._backward_of(rank, action)

    def _backward_of(self, rank: int, action: Backward) -> None:
        losses, reached = [], set()
        self._take(rank)
        for term in action.terms:
            if term.ranks is not None and rank not in term.ranks:
                continue
            param = self.params[term.param]
            use = prelude.look if self._kinds[term.param].kind == "sparse" else prelude.use
            loss = use(param, term.batch, rank, term.times)
            if term.factor is not None:
                on = 0 if term.ranks is None else term.ranks[0]
                loss = loss * (float(term.factor) if rank == on else 1.0)
            losses.append(loss)
            if param.requires_grad:
                reached.add(term.param)
        had = dict(self.grads[rank])
        if action.weighted is not None:
            n = action.weighted[1][rank]
            # Without samples there is no gradient.
            prelude.backward(losses if n else [], lambda loss: loss * n)
        elif action.scaled is not None:
            scaler = self._scalers[action.scaled]
            assert scaler is not None, "it scales a loss"
            prelude.backward(losses, scaler.scale)
        else:
            prelude.backward(losses)
        self._put_back(rank)
        for of, names in enumerate(self._names):
            own = [name for name in names if name in reached]
            if own:
                self._averaged[of] = False
            for name in own:
                if (grad := self.grads[rank][name]) is not None:
                    self._tolerances[of].see_pass(rank, name, grad, is_first=had[name] is None)
            heard = [name for name in own if name not in self._unheard[of]]
            self.rules.backward(rank, of, heard, self._backwards, counts=of not in action.no_sync, had=had)

    def _take(self, rank: int) -> None:
        for name, param in self.params.items():
            param.requires_grad_(not self._frozen[rank][name])
            param.grad = self.grads[rank][name]

    def _put_back(self, rank: int) -> None:
        for name, param in self.params.items():
            self.grads[rank][name] = param.grad
            param.grad = None
            param.requires_grad_(True)

    def _zero_grad(self, action: ZeroGrad) -> None:
        chosen = range(len(self._names)) if action.of is None else [action.of]
        if action.of is not None:
            self._leave_if_found_apart(action.of)
            self.rules.require_alike(self.ranks, action.of)
            self._weight[action.of] = None
        elif any(weight is not None for weight in self._weight):
            raise Unsettled("gradients are dropped, and hvdlite cannot see that their weights are")
        for rank in self._among(action.ranks):
            for of in chosen:
                if action.of is not None:
                    self.rules.zero_grad(rank, of)
                    self._averaged[of] = False
                for name in self._names[of]:
                    grad = self.grads[rank][name]
                    if action.of is None and grad is not None:
                        drops, is_sparse = action.to_none, self._kinds[name].kind == "sparse"
                        self.rules.change(rank, of, name, in_place=not drops, drops=drops, is_sparse=is_sparse)
                    self.grads[rank][name] = None if action.to_none or grad is None else torch.zeros_like(grad)

    def _set_grad(self, action: SetGrad) -> None:
        name, of = action.param, self._optimizer_of(action.param)
        if of is not None and self._weight[of] is not None:
            raise Unsettled("a gradient by hand has no weight")
        if of is not None and name in self._unheard[of]:
            raise Unsettled("a parameter that was put into the groups is heard from the next step on that begins")
        for rank in self._among(action.ranks):
            drawn = prelude.draw(self.params[name].detach(), action.batch, rank)
            old = self.grads[rank][name]
            if of is not None and self._frozen[rank][name]:
                leave_if_known("unfreezing within a step")
            if of is not None and not (action.how in ("in place", "none") and old is None):
                self.rules.change(rank, of, name, in_place=action.how == "in place")
            match action.how:
                case "replace":
                    new: Tensor | None = drawn
                case "add":
                    new = drawn if old is None else old + drawn
                case "in place":
                    new = None if old is None else drawn
                case _:
                    new = None
            self.grads[rank][name] = new

    def _freeze(self, action: Freeze) -> None:
        of = self._optimizer_of(action.param)
        for rank in self._among(action.ranks):
            if of is not None and action.frozen and action.param in self._unheard[of]:
                leave_if_known("param_groups changed, and the new parameter frozen before the step")
            if of is not None and not action.frozen and self.rules.has_begun(rank, of):
                leave_if_known("unfreezing within a step")
            self._frozen[rank][action.param] = action.frozen

    def _read(self, action: Read) -> None:
        if action.ranks is not None:
            leave_if_known("reading on one rank")

    # -- what changes an optimizer

    def _set_rate(self, action: SetRate) -> None:
        for inner in self._inner[action.of]:
            for group in inner.param_groups:
                group["lr"] *= 0.5

    def _leave_if_found_apart(self, of: int) -> None:
        begun = {self.rules.has_begun(rank, of) for rank in self.ranks}
        if self._is_changed[of] and len(begun) > 1:
            leave_if_known("param_groups changed, and a rank without a backward pass")

    def _add_param(self, action: AddParam, at: int) -> None:
        of, name = action.of, action.param.name
        self._leave_if_found_apart(of)
        self._is_changed[of] |= action.how != "wrapper"
        if action.how != "wrapper":
            self._unheard[of].add(name)
        if action.how != "wrapper":
            leave_if_known("param_groups changed behind the wrapper")
        self._make(action.param, 50 + at)
        param = self.params[name]
        if action.how == "wrapper":
            for rank in self.ranks:
                self.rules.settle(rank, of, "add_param_group()")
        for inner in self._inner[of]:
            if action.how in ("wrapper", "inner"):
                inner.add_param_group({"params": [param], "lr": rate_of(self._wrapped[of], 1)})
            elif action.how == "append":
                inner.param_groups[0]["params"].append(param)
            elif action.how == "group":
                inner.param_groups.append({**inner.param_groups[0], "params": [param]})
            else:
                gone = self.params[self._names[of][0]]
                inner.param_groups[0]["params"][0] = param
                inner.state.pop(gone, None)
        if action.how == "replace":
            self._names[of][0] = name
        else:
            self._names[of].append(name)

    def _consolidate(self, action: Consolidate, record: Record | None) -> None:
        of = action.of
        self._leave_if_found_apart(of)
        for rank in self.ranks:
            self.rules.settle(rank, of, "consolidate_state_dict()")
        if self._unheard[of]:
            raise Unsettled("a parameter that was put into the groups is heard from here on")
        (inner,) = self._inner[of]
        if record is not None and record.state is not None:
            params = [param for group in inner.param_groups for param in group["params"]]
            said = difference_of_states(
                record.state,
                inner.state_dict(),
                lambda number, value: self._tolerances[of].of_state(value, params[number]),
            )
            if said is not None:
                self._found(f"the consolidated state {said}")
            # As they are: `load_state_dict` would cast them.
            for number, each in record.state["state"].items():
                inner.state[params[number]] = copy.deepcopy(each)
        if action.loads:
            inner.load_state_dict(copy.deepcopy(inner.state_dict()))

    def _reload(self, action: Reload) -> None:
        if action.how == "state":
            for inner in self._inner[action.of]:
                inner.load_state_dict(copy.deepcopy(inner.state_dict()))
        else:
            self.rules.begin_anew(self.ranks, action.of)
            for rank in self.ranks:
                # A parameter is copied without its gradient.
                self.grads[rank].update(dict.fromkeys(self._names[action.of]))
            self._averaged[action.of], self._weight[action.of] = False, None
            # A copy has what is in the groups from its beginning.
            self._unheard[action.of].clear()
            self._is_changed[action.of] = False

    # -- steps

    def _step(self, action: Step, record: Record | None) -> None:
        if action.inside is not None:
            self._backward(action.inside)
        self._leave_if_found_apart(action.of)
        if _is_adasum(self._wrapped[action.of]):
            if action.how == "closure":
                leave_if_known("Adasum with a closure")
            self._step_adasum(action.of)
        else:
            if self._scalers[action.of] is not None:
                for rank in self.ranks:
                    names = [
                        name
                        for name in self._names[action.of]
                        if not self._frozen[rank][name]
                        or any(self.grads[other][name] is not None for other in self.ranks)
                    ]
                    if not self.rules.is_complete(rank, action.of, names):
                        leave_if_known("a scaler in a step that is not complete")
            self._synchronize(action.of)
            self._step_averages(action, record)
        self._note_step(action.of)
        for schedule in self._schedules[action.of]:
            schedule.step()
        if record is not None:
            self._adopt_params(action.of, record)

    def _note_step(self, of: int) -> None:
        unseen = None
        if _is_adasum(self._wrapped[of]):
            self._is_taken = True
            unseen = "surplus gradients of a pass for Adasum"
        elif not self._is_taken:
            unseen = "surplus gradients of a step that GradScaler skips"
        self._is_changed[of] = False
        self._unheard[of].clear()
        for rank in self.ranks:
            self.rules.step(rank, of, was_taken=self._is_taken, unseen=unseen)

    def _synchronize(self, of: int) -> None:
        for rank in self.ranks:
            self.rules.synchronize(rank, of, self.grads[rank])
        if self._averaged[of]:
            return
        self._averaged[of] = True
        size = 1.0 if "Sum" in str(self._wrapped[of].option("op")) else float(len(self.ranks))
        divisor = size if self._weight[of] is None else float(self._weight[of] or 1)
        for name in self._names[of]:
            own = {rank: self.grads[rank][name] for rank in self.ranks}
            self._tolerances[of].see(name, own, divisor)
            total = combine(list(own.values()), divisor)
            if self._divides[of] and total is not None:
                total = total.to_dense()
            for rank in self.ranks:
                self.grads[rank][name] = total
        # Steps without weights before those with them.
        self._has_stepped[of] |= self._weight[of] is None
        self._weight[of] = None

    def _step_averages(self, action: Step, record: Record | None) -> None:
        of, (inner,) = action.of, self._inner[action.of]
        self._is_taken = False
        wrapped, scaler = self._wrapped[of], self._scalers[of]
        params = [self.params[name] for name in self._names[of]]
        first = self.ranks[0]
        for name in self._names[of]:
            grad = self.grads[first][name]
            self.params[name].grad = None if grad is None else grad.clone()

        def compare(*_: Any) -> None:
            self._is_taken = True
            if record is not None and self._frees[of]:
                # What the program has read before the step, which clips them.
                self._compare_grads(of, record, action.how)
            if (max_norm := wrapped.option("max_norm")) is not None:
                torch.nn.utils.clip_grad_norm_(params, max_norm)
            if record is not None and not self._frees[of]:
                self._compare_grads(of, record, action.how)

        hook = inner.register_step_pre_hook(compare)
        try:
            if action.how in ("clip", "unscale", "synchronize and unscale"):
                if scaler is not None:
                    scaler.unscale_(inner)
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            if scaler is not None:
                scaler.step(inner)
                scaler.update()
            else:
                inner.step()
        finally:
            hook.remove()
        if record is not None and not self._is_taken:
            # What a codec makes of infinities is its own.
            for name, param in zip(self._names[of], params, strict=True):
                got = record.grads[name]
                param.grad = param.grad if got is None else got.clone()
        if scaler is not None and record is not None and scaler.get_scale() != record.scale:
            self._found(f"the scale of optimizer {of} is {record.scale}, and should be {scaler.get_scale()}")
        for name, param in zip(self._names[of], params, strict=True):
            left = None if self._frees[of] and self._is_taken else param.grad
            if self._divides[of] and self._is_taken and record is not None and record.grads[name] is not None:
                self._found(f"the gradient of {name} is left after the step")
            for rank in self.ranks:
                self.grads[rank][name] = None if left is None else left.clone()
            param.grad = None
        self._averaged[of] = False

    def _compare_grads(self, of: int, record: Record, how: str) -> None:
        """Compares gradients right before they are used, and has the optimizer use those of the ranks."""
        grads = record.before if self._frees[of] else record.grads
        if grads is None:
            return
        params = [self.params[name] for name in self._names[of]]
        for name in self._names[of]:
            param = self.params[name]
            is_clipped = how in ("clip", "unscale", "synchronize and unscale") or self._wrapped[of].option("max_norm")
            tolerance = self._tolerances[of].of_grad(name, param, params if is_clipped else ())
            got = grads[name]
            if self._divides[of] and got is not None:
                # Sparse ones are made dense where each rank has a part.
                got = got.to_dense()
            said = difference_of(got, param.grad, tolerance)
            if said is not None:
                self._found(f"the gradient of {name} {said}")
            if got is not None:
                param.grad = got.clone()

    def _step_adasum(self, of: int) -> None:
        params = [self.params[name] for name in self._names[of]]
        before = [param.detach().clone() for param in params]
        deltas = []
        for rank, inner in zip(self.ranks, self._inner[of], strict=True):
            for name, param in zip(self._names[of], params, strict=True):
                param.grad = self.grads[rank][name]
            inner.step()
            deltas.append([param.detach() - start for param, start in zip(params, before, strict=True)])
            for param, start in zip(params, before, strict=True):
                param.grad = None
                param.data.copy_(start)
        for param, start, *own in zip(params, before, *deltas, strict=True):
            param.data.copy_(start + adasum(own))

    def _adopt_params(self, of: int, record: Record) -> None:
        for name in self._names[of]:
            param, got = self.params[name], record.params[name]
            said = difference_of(
                got, param.detach(), self._tolerances[of].of_param(param, rate_of(self._wrapped[of], 0))
            )
            if said is not None:
                self._found(f"the parameter {name} {said}")
            param.data.copy_(got)

    def _join(self, action: Join, record: Record) -> None:
        of = action.of
        (inner,) = self._inner[of]
        for step in range(max(action.steps)):
            active = [rank for rank in self.ranks if action.steps[rank] > step]
            totals = dict.fromkeys(self._names[of])
            own = []
            for rank in active:
                param = self.params[action.param]
                param.grad = None
                use = prelude.look if self._kinds[action.param].kind == "sparse" else prelude.use
                param.requires_grad_(not self._frozen[rank][action.param])
                prelude.backward([use(param, action.batch + step, rank)])
                own.append(param.grad)
                param.requires_grad_(True)
            count = len(self.ranks) if action.average == "all" else len(active)
            if "Sum" in str(self._wrapped[of].option("op")):
                count = 1
            totals[action.param] = combine(own, float(count))
            for name, total in totals.items():
                self.params[name].grad = total
            if (max_norm := self._wrapped[of].option("max_norm")) is not None:
                torch.nn.utils.clip_grad_norm_([self.params[name] for name in totals], max_norm)
            inner.step()
        for name in self._names[of]:
            said = difference_of(
                record.params[name],
                self.params[name].detach(),
                self._tolerances[of].of_joined(self.params[name], rate_of(self._wrapped[of], 0)),
            )
            if said is not None:
                self._found(f"the parameter {name} after a join {said}")


def combine(grads: Sequence[Tensor | None], divisor: float) -> Tensor | None:
    """Returns the sum of gradients, divided; None counts as zero, and is the result where all are None."""
    given = [grad for grad in grads if grad is not None]
    if not given:
        return None
    wide = torch.complex128 if given[0].is_complex() else torch.float64
    if all(grad.is_sparse for grad in given):
        total = given[0].to(wide)
        for grad in given[1:]:
            total = total + grad.to(wide)
        return (total.coalesce() / divisor).to(given[0].dtype)
    dense = [(grad.to_dense() if grad.is_sparse else grad).to(wide) for grad in given]
    return (sum(dense[1:], dense[0]) / divisor).to(given[0].dtype)


def adasum(vectors: list[Tensor]) -> Tensor:
    """The paper's formula for two vectors, up a binary tree; one without a partner goes up unchanged."""
    if len(vectors) == 1:
        return vectors[0]
    pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
    return adasum([_of_two(*pair) if len(pair) == 2 else pair[0] for pair in pairs])


def _of_two(a: Tensor, b: Tensor) -> Tensor:
    if a.is_complex():
        return torch.view_as_complex(_of_two(torch.view_as_real(a), torch.view_as_real(b)))
    dot, aa, bb = ((x.double() * y.double()).sum() for x, y in ((a, b), (a, a), (b, b)))
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def _is_adasum(wrapped: Wrapped) -> bool:
    return "Adasum" in str(wrapped.option("op"))
