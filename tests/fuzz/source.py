"""
Writes a program as Python: a function ``train(rank, show)``, which ranks run, and whole programs for reports.

    Program ── Source.text (with the line of each action) ── Source.train, on ranks
                                                          └─ runnable(program), for people
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Mapping
from typing import Any

import torch

import hvdlite as hvd

from . import prelude
from .program import (
    AddParam,
    Backward,
    Collective,
    Consolidate,
    Freeze,
    Join,
    Program,
    Ranks,
    Read,
    Reload,
    SetGrad,
    SetRate,
    Step,
    Term,
    Wrapped,
    ZeroGrad,
)

# Options whose values are expressions, not literals.
_EXPRESSIONS = ("op", "compression", "exchange")

_NAMES: dict[str, Any] = {"torch": torch, "hvd": hvd, "copy": __import__("copy"), "io": __import__("io")}
_PRELUDE = (
    prelude.draw,
    prelude.param,
    prelude.use,
    prelude.look,
    prelude.backward,
    prelude.grads_of,
    prelude.Normed,
    prelude.Mean,
    prelude.Rounding,
)


class Source:
    """The text of a program, and the number of the action that each of its lines belongs to."""

    def __init__(self, program: Program, undivided: Mapping[int, bool] | None = None) -> None:
        """``undivided``: write these optimizers without ``shard``; if True, one that drops gradients as that does."""
        self.program = program
        self._undivided = undivided or {}
        self._lines: list[str] = []
        self._action_of: list[int] = []
        self._at = -1
        # The parameters of each optimizer, at this place of the program.
        self._params = [list(wrapped.params) for wrapped in program.optimizers]
        self._write()
        self.text = "\n".join(self._lines) + "\n"
        self.filename = f"<program {program.seed}>"

    def train(self) -> Any:
        """Returns the function ``train(rank, show)``."""
        # For stacks and tracebacks.
        linecache.cache[self.filename] = len(self.text), None, self.text.splitlines(keepends=True), self.filename
        names = {**_NAMES, **{each.__name__: each for each in _PRELUDE}}
        exec(compile(self.text, self.filename, "exec"), names)
        return names["train"]

    def action_at(self, line: int) -> int:
        """Returns the number of the action that a line (from 1) belongs to; -1: before the first."""
        return self._action_of[line - 1]

    # -- writing

    def _write(self) -> None:
        program = self.program
        self._put("def train(rank, show):", indent=0)
        if program.members is not None:
            self._put(f"members = hvd.add_process_set({list(program.members)})")
        for number, param in enumerate(program.params):
            self._make(param, number)
        for number, wrapped in enumerate(program.optimizers):
            self._wrap(number, wrapped)
        for self._at, action in enumerate(program.actions):
            getattr(self, f"_{type(action).__name__.lower()}")(action)
        self._put("hvd.barrier()")
        for number in range(len(program.optimizers)):
            self._put(f"opt{number}.close()")
        if program.members is not None:
            self._put("hvd.remove_process_set(members)")

    def _put(self, line: str, indent: int = 1) -> None:
        self._lines.append("    " * indent + line)
        self._action_of.append(self._at)

    def _on(self, ranks: Ranks, *lines: str) -> None:
        """Writes lines that some ranks execute."""
        if ranks is not None:
            self._put(f"if rank in {ranks}:")
        for line in lines:
            self._put(line, 1 if ranks is None else 2)

    def _make(self, param: Any, number: int) -> None:
        more = "" if (param.dtype, param.kind) == ("float64", "plain") else f", {param.dtype!r}, {param.kind!r}"
        self._put(f"{param.name} = param({param.shape}, {number}{more})")
        if param.frozen:
            self._put(f"{param.name}.requires_grad_(False)")

    def _wrap(self, number: int, wrapped: Wrapped) -> None:
        groups = []
        for place, names in enumerate(wrapped.groups):
            rate = f', "lr": {rate_of(wrapped, place)}' if place else ""
            groups.append(f'{{"params": [{", ".join(names)}]{rate}}}')
        arguments = "".join(f", {name}={value!r}" for name, value in wrapped.arguments)
        kind = wrapped.kind if hasattr(prelude, wrapped.kind) else f"torch.optim.{wrapped.kind}"
        self._put(f"inner{number} = {kind}([{', '.join(groups)}]{arguments})")
        kept = [each for each in wrapped.options if each[0] != "shard" or number not in self._undivided]
        options = "".join(f", {name}={self._option(name, value)}" for name, value in kept)
        if self.program.members is not None:
            options += ", process_set=members"
        named = ", ".join(f'("{name}", {name})' for name in wrapped.params)
        self._put(f"opt{number} = hvd.DistributedOptimizer(inner{number}, named_parameters=[{named}]{options})")
        if wrapped.scaler is not None:
            self._put(f'scaler{number} = torch.amp.GradScaler("cpu", init_scale={wrapped.scaler}, growth_interval=2)')
        if wrapped.schedule is not None:
            self._put(f"schedule{number} = torch.optim.lr_scheduler.StepLR(opt{number}, 1, {wrapped.schedule})")

    @staticmethod
    def _option(name: str, value: Any) -> str:
        if name == "groups" and not isinstance(value, int):
            return "[" + ", ".join(f"[{', '.join(names)}]" for names in value) + "]"
        return value if name in _EXPRESSIONS else repr(value)

    # -- actions

    def _backward(self, action: Backward, indent: int = 1) -> None:
        everywhere = ", ".join(self._loss(term) for term in action.terms if term.ranks is None)
        self._put(f"losses = [{everywhere}]", indent)
        for term in action.terms:
            if term.ranks is not None:
                self._put(f"if rank in {term.ranks}:", indent)
                self._put(f"losses.append({self._loss(term)})", indent + 1)
        change = ""
        if action.weighted is not None:
            of, ns = action.weighted
            change = f", lambda loss: opt{of}.weighted(loss, {ns}[rank])"
        elif action.scaled is not None:
            change = f", scaler{action.scaled}.scale"
        if action.no_sync:
            self._put("with " + ", ".join(f"opt{of}.no_sync()" for of in action.no_sync) + ":", indent)
        self._put(f"backward(losses{change})", indent + bool(action.no_sync))

    def _loss(self, term: Term) -> str:
        kind = self.program.all_params()[term.param].kind
        times = f", {term.times}" if term.times != 1 else ""
        loss = f"{'look' if kind == 'sparse' else 'use'}({term.param}, {term.batch}, rank{times})"
        if term.factor is not None:
            on = 0 if term.ranks is None else term.ranks[0]
            loss += f' * (float("{term.factor}") if rank == {on} else 1.0)'
        return loss

    def _step(self, action: Step) -> None:
        of = action.of
        scaler = f"scaler{of}" if self.program.optimizers[of].scaler is not None else None
        drops = self._undivided.get(of, False)
        if drops and scaler is not None:
            self._put(f"scale = {scaler}.get_scale()")
        lines = self._lines_of(action)
        # With shard= there are none after the step.
        reads = self.program.optimizers[of].option("shard") and action.how not in ("plain", "closure", "scaler")
        if reads:
            at = next(place for place, line in enumerate(lines) if line.startswith("with ") or ".step(" in line)
            lines.insert(at, f"before = grads_of({{{self._shown(of)}}})")
        self._on(None, *lines)
        if drops:
            # A GradScaler that skips a step makes its scale smaller.
            self._put(f"{'' if scaler is None else f'if {scaler}.get_scale() >= scale: '}opt{of}.zero_grad()")
        if self.program.optimizers[of].schedule is not None:
            self._put(f"schedule{of}.step()")
        self._show(of, ", before=before" if reads else "")

    def _lines_of(self, action: Step) -> list[str]:
        """Returns what takes the step, and writes what comes before it."""
        of = action.of
        opt, scaler = f"opt{of}", f"scaler{of}"
        clip = f"torch.nn.utils.clip_grad_norm_([{', '.join(self._params[of])}], 0.5)"
        skip = f"with {opt}.skip_synchronize():"
        match action.how:
            case "plain":
                lines = [f"{opt}.step()"]
            case "synchronize":
                lines = [f"{opt}.synchronize()", skip, f"    {opt}.step()"]
            case "clip":
                lines = [f"{opt}.synchronize()", clip, skip, f"    {opt}.step()"]
            case "twice":
                lines = [f"{opt}.synchronize()", f"{opt}.synchronize()", f"{opt}.step()"]
            case "scaler":
                lines = [f"{scaler}.step({opt})", f"{scaler}.update()"]
            case "unscale":
                lines = [f"{scaler}.unscale_({opt})", clip, f"{scaler}.step({opt})", f"{scaler}.update()"]
            case "synchronize and unscale":
                lines = [f"{opt}.synchronize()", f"{scaler}.unscale_({opt})", clip, skip]
                lines += [f"    {scaler}.step({opt})", f"{scaler}.update()"]
            case "closure":
                self._put("def closure():")
                assert action.inside is not None, "it is what the closure computes"
                self._backward(action.inside, indent=2)
                self._put("return 0.0", 2)
                lines = [f"{opt}.step(closure)"]
            case _:
                raise ValueError(action.how)
        return lines

    def _shown(self, of: int) -> str:
        return ", ".join(f'"{name}": {name}' for name in self._params[of])

    def _show(self, of: int, more: str = "") -> None:
        scale = f", scaler{of}.get_scale()" if self.program.optimizers[of].scaler is not None else ""
        self._put(f"show({self._at}, {{{self._shown(of)}}}, inner{of}{scale}{more})")

    def _zerograd(self, action: ZeroGrad) -> None:
        if action.of is None:
            lines = [f"for each in ({''.join(f'{name}, ' for name in self._present())}):"]
            lines += ["    each.grad = None"] if action.to_none else ["    if each.grad is not None: each.grad.zero_()"]
            self._on(action.ranks, *lines)
        else:
            self._on(action.ranks, f"opt{action.of}.zero_grad({'' if action.to_none else 'set_to_none=False'})")

    def _present(self) -> list[str]:
        return [name for names in self._params for name in names]

    def _freeze(self, action: Freeze) -> None:
        self._on(action.ranks, f"{action.param}.requires_grad_({not action.frozen})")

    def _setgrad(self, action: SetGrad) -> None:
        name = action.param
        drawn = f"draw({name}, {action.batch}, rank)"
        line = {
            "replace": f"{name}.grad = {drawn}",
            "add": f"{name}.grad = {drawn} if {name}.grad is None else {name}.grad + {drawn}",
            "in place": f"{name}.grad.copy_({drawn}) if {name}.grad is not None else None",
            "none": f"{name}.grad = None",
        }[action.how]
        self._on(action.ranks, line)

    def _addparam(self, action: AddParam) -> None:
        of, name = action.of, action.param.name
        self._make(action.param, 50 + self._at)
        group = f'{{"params": [{name}], "lr": {rate_of(self.program.optimizers[of], 1)}}}'
        match action.how:
            case "wrapper":
                self._put(f"opt{of}.add_param_group({group})")
            case "inner":
                self._put(f"inner{of}.add_param_group({group})")
            case "append":
                self._put(f'opt{of}.param_groups[0]["params"].append({name})')
            case "group":
                self._put(f'opt{of}.param_groups.append({{**opt{of}.param_groups[0], "params": [{name}]}})')
            case "replace":
                gone, self._params[of][0] = self._params[of][0], name
                self._put(f'opt{of}.param_groups[0]["params"][0] = {name}')
                self._put(f"opt{of}.state.pop({gone}, None)")
            case _:
                raise ValueError(action.how)
        if action.how != "replace":
            self._params[of].append(name)

    def _reload(self, action: Reload) -> None:
        of = action.of
        all_of_it = f"[{', '.join(self._params[of])}, inner{of}, opt{of}]"
        match action.how:
            case "state":
                self._put(f"opt{of}.load_state_dict(copy.deepcopy(opt{of}.state_dict()))")
            case "deepcopy":
                self._put(f"{all_of_it} = copy.deepcopy({all_of_it})")
            case "pickle":
                self._put("file = io.BytesIO()")
                self._put(f"torch.save({all_of_it}, file)")
                self._put("file.seek(0)")
                self._put(f"{all_of_it} = torch.load(file, weights_only=False)")
            case _:
                raise ValueError(action.how)

    def _consolidate(self, action: Consolidate) -> None:
        of = action.of
        self._put(f"opt{of}.consolidate_state_dict(to=None)")
        self._put(f"show({self._at}, {{}}, inner{of}, state=opt{of}.state_dict())")
        if action.loads:
            self._put(f"opt{of}.load_state_dict(copy.deepcopy(opt{of}.state_dict()))")

    def _read(self, action: Read) -> None:
        of = action.of
        line = {
            "groups": f'opt{of}.param_groups[0]["lr"]',
            "state": f"opt{of}.state",
            "repr": f"repr(opt{of})",
            "state_dict": f"opt{of}.state_dict()",
        }[action.what]
        self._on(action.ranks, line)

    def _setrate(self, action: SetRate) -> None:
        through = f"{'opt' if action.through == 'wrapper' else 'inner'}{action.of}"
        self._put(f"for group in {through}.param_groups:")
        self._put('    group["lr"] *= 0.5')

    def _collective(self, action: Collective) -> None:
        self._put(f'hvd.allreduce(torch.ones(3), name="own {action.batch}")')

    def _join(self, action: Join) -> None:
        of, params = action.of, ", ".join(f'("{name}", {name})' for name in self._params[action.of])
        self._put(f"for batch in range({action.batch}, {action.batch} + {action.steps}[rank]):")
        self._put(f"opt{of}.zero_grad()", 2)
        loss = self._loss(Term(action.param, action.batch)).replace(f", {action.batch}, ", ", batch, ")
        self._put(f"backward([{loss}])", 2)
        self._put(f"opt{of}.step()", 2)
        self._put(f'last = hvd.join(average="{action.average}")')
        self._put(f"hvd.broadcast_parameters([{params}], root_rank=last)")
        self._show(of)


def rate_of(wrapped: Wrapped, group: int) -> float:
    """Returns the learning rate of a parameter group: the optimizer's own, halved for each further group."""
    rate: float = dict(wrapped.arguments)["lr"]
    return rate / 2**group


def runnable(program: Program) -> str:
    """Returns the whole program, as a file that hvdlite-run can start."""
    text = Source(program).text
    used = [each for each in _PRELUDE if f"{each.__name__}" in text or each in (prelude.draw, prelude.param)]
    body = "\n\n".join(inspect.getsource(each).rstrip() for each in used)
    return f"""# hvdlite-run -np {program.size} python program.py    (seed {program.seed})
import copy, io
from collections.abc import Callable, Sequence
from typing import Any
import torch
from torch import Tensor
import hvdlite as hvd


{body}


{text}

def show(step, params, inner, scale=None, before=None, state=None):
    for name, each in params.items():
        grad = None if each.grad is None else each.grad.to_dense().tolist()
        print(f"[{{hvd.rank()}}] action {{step}}: {{name}} = {{each.tolist()}}, grad {{grad}}", flush=True)


hvd.init()
train(hvd.rank(), show)
"""
