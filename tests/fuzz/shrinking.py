"""Leaves away what a program does not need to fail in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .program import (
    Action,
    AddParam,
    Backward,
    Collective,
    Freeze,
    Join,
    Param,
    Program,
    Step,
    Term,
    Wrapped,
)

_PLAIN_OPTIMIZER = ("SGD", (("lr", 1.0),))


def shrink(program: Program, fails: Callable[[Program], bool], limit_s: float = 60.0) -> Program:
    """Returns a smaller program for which ``fails`` is True as well; it is called with each attempt."""
    ends_at = time.monotonic() + limit_s
    is_smaller = True
    while is_smaller:
        is_smaller, place = False, 0
        # A cut that succeeds is followed by those behind it: those before it have just failed.
        while place < len(attempts := list(_smaller(program))):
            if time.monotonic() > ends_at:
                return program
            if fails(attempts[place]):
                program, is_smaller = attempts[place], True
            else:
                place += 1
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yields programs with less in them, the largest cuts first."""
    actions = program.actions
    length = max(1, len(actions) // 2)
    while length:
        # Those at the end first: what comes after a failure has no part in it.
        for start in reversed(range(0, len(actions), length)):
            yield _with_actions(program, [*actions[:start], *actions[start + length :]])
        length //= 2
    for of in range(len(program.optimizers)):
        yield from _without_optimizer(program, of)
    for param in program.params:
        yield from _without_param(program, param.name)
    if program.members is not None:
        yield replace(program, members=None)
    for of, wrapped in enumerate(program.optimizers):
        for simpler in _simpler_optimizers(wrapped):
            yield _with_optimizer(program, of, simpler)
    for number, action in enumerate(actions):
        for simpler_action in _simpler_actions(action):
            yield replace(program, actions=(*actions[:number], simpler_action, *actions[number + 1 :]))
    for number, param in enumerate(program.params):
        for simpler_param in _simpler_params(param):
            yield replace(program, params=(*program.params[:number], simpler_param, *program.params[number + 1 :]))


def _with_actions(program: Program, actions: list[Action]) -> Program:
    """Drops what needs an action that is gone: a parameter that is not added has no other use."""
    present = {param.name for param in program.params}
    kept: list[Action] = []
    for action in actions:
        if isinstance(action, AddParam):
            present.add(action.param.name)
            kept.append(action)
            continue
        used = _used(action)
        if isinstance(action, Backward):
            terms = tuple(term for term in action.terms if term.param in present)
            if terms:
                kept.append(replace(action, terms=terms))
        elif used <= present:
            kept.append(action)
    return replace(program, actions=tuple(kept))


def _used(action: Action) -> set[str]:
    if isinstance(action, Step) and action.inside is not None:
        return {term.param for term in action.inside.terms}
    name = getattr(action, "param", None)
    return {name} if isinstance(name, str) else set()


def _without_param(program: Program, name: str) -> Iterator[Program]:
    optimizers = []
    for wrapped in program.optimizers:
        groups = tuple(tuple(each for each in group if each != name) for group in wrapped.groups)
        groups = tuple(group for group in groups if group)
        if not groups:
            return
        options = tuple((key, value) for key, value in wrapped.options if key != "groups" or isinstance(value, int))
        optimizers.append(replace(wrapped, groups=groups, options=options))
    smaller = replace(
        program, params=tuple(param for param in program.params if param.name != name), optimizers=tuple(optimizers)
    )
    yield _with_actions(smaller, list(program.actions))


def _without_optimizer(program: Program, of: int) -> Iterator[Program]:
    if len(program.optimizers) == 1:
        return
    gone = set(program.optimizers[of].params)
    actions: list[Action] = []
    for action in program.actions:
        if getattr(action, "of", None) == of:
            continue
        if isinstance(action, Backward) and action.scaled == of:
            continue
        actions.append(_renumbered(action, of))
    smaller = replace(
        program,
        params=tuple(param for param in program.params if param.name not in gone),
        optimizers=tuple(each for number, each in enumerate(program.optimizers) if number != of),
    )
    yield _with_actions(smaller, actions)


def _renumbered(action: Action, gone: int) -> Action:
    """Makes numbers of optimizers those without ``gone``; there are two at most, so the other one is 0."""
    changes: dict[str, Any] = {}
    if getattr(action, "of", None) is not None:
        changes["of"] = 0
    if isinstance(action, Backward):
        changes["no_sync"] = tuple(0 for of in action.no_sync if of != gone)
        changes["scaled"] = None if action.scaled is None else 0
    return replace(action, **changes)


def _with_optimizer(program: Program, of: int, wrapped: Wrapped) -> Program:
    optimizers = (*program.optimizers[:of], wrapped, *program.optimizers[of + 1 :])
    smaller = replace(program, optimizers=optimizers)
    if wrapped.scaler is None and program.optimizers[of].scaler is not None:
        smaller = replace(smaller, actions=tuple(_unscaled(action, of) for action in program.actions))
    return smaller


def _unscaled(action: Action, of: int) -> Action:
    if isinstance(action, Backward) and action.scaled == of:
        return replace(action, scaled=None)
    if isinstance(action, Step) and action.of == of:
        return replace(action, how="plain")
    return action


def _simpler_optimizers(wrapped: Wrapped) -> Iterator[Wrapped]:
    if (wrapped.kind, wrapped.arguments) != _PLAIN_OPTIMIZER:
        yield replace(wrapped, kind=_PLAIN_OPTIMIZER[0], arguments=_PLAIN_OPTIMIZER[1])
    for name, _ in wrapped.options:
        yield replace(wrapped, options=tuple(each for each in wrapped.options if each[0] != name))
    if wrapped.schedule is not None:
        yield replace(wrapped, schedule=None)
    if wrapped.scaler is not None:
        yield replace(wrapped, scaler=None)
    if len(wrapped.groups) > 1:
        yield replace(wrapped, groups=(wrapped.params,))


def _simpler_actions(action: Action) -> Iterator[Action]:
    if isinstance(action, Backward):
        yield from _simpler_backwards(action)
    elif isinstance(action, Step):
        if action.how != "plain" and "scale" not in action.how:
            yield replace(action, how="plain", inside=None)
        elif action.how in ("unscale", "synchronize and unscale"):
            yield replace(action, how="scaler")
    elif isinstance(action, Join):
        if any(count > 1 for count in action.steps):
            yield replace(action, steps=tuple(min(1, count) for count in action.steps))
    elif not isinstance(action, Collective) and getattr(action, "ranks", None) is not None:
        yield replace(action, ranks=None)
    if isinstance(action, AddParam) and action.how != "wrapper":
        yield replace(action, how="wrapper")


def _simpler_backwards(action: Backward) -> Iterator[Backward]:
    if len(action.terms) > 1:
        for number in range(len(action.terms)):
            yield replace(action, terms=(*action.terms[:number], *action.terms[number + 1 :]))
    if action.no_sync:
        yield replace(action, no_sync=())
    if action.weighted is not None:
        yield replace(action, weighted=None)
    for number, term in enumerate(action.terms):
        for simpler in _simpler_terms(term):
            yield replace(action, terms=(*action.terms[:number], simpler, *action.terms[number + 1 :]))


def _simpler_terms(term: Term) -> Iterator[Term]:
    for name, plain in (("ranks", None), ("times", 1), ("factor", None)):
        if getattr(term, name) != plain:
            yield replace(term, **{name: plain})


def _simpler_params(param: Param) -> Iterator[Param]:
    if param.frozen:
        yield replace(param, frozen=False)
    if param.kind in ("channels_last", "transposed"):
        yield replace(param, kind="plain")
    if param.dtype != "float64":
        yield replace(param, dtype="float64")
    if param.kind == "plain" and param.shape != (1,):
        yield replace(param, shape=(1,))


def size_of(program: Program) -> int:
    """Counts what is in a program: actions, terms, parameters and options."""
    terms = sum(len(action.terms) for action in program.actions if isinstance(action, Backward))
    options = sum(len(wrapped.options) for wrapped in program.optimizers)
    return len(program.actions) + terms + len(program.params) + options


# Every action has fields that `replace` can change.
assert all(fields(kind) for kind in (Freeze, Step, Backward))
