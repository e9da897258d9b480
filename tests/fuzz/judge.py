"""
Compares what ranks have after every step with the truth, and with each other.

A program passes if all ranks have the same bits and these are right, or if every rank ends with an error in words that
`rules` knows a reason for (or that torch raises in one process too). Everything else is a `Finding`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdlite.errors import CommunicationError, HvdliteError

from .known import Unsettled
from .pool import Leg, Outcome, Pool
from .program import Action, Consolidate, Join, Program, Step
from .records import difference_of_states, is_same, shown
from .rules import Rules
from .source import Source
from .truth import Truth


@dataclass(frozen=True)
class Finding:
    """``kind`` says in which way a program fails, without its numbers; ``words`` say it in full."""

    kind: str
    words: str

    @property
    def family(self) -> str:
        """The kind in a word or two, which stays the same while a program shrinks."""
        if self.kind.startswith("error: "):
            return re.split(r"[(\s]", self.kind.removeprefix("error: "))[0]
        return next(
            (family for family in ("differs", "rates or scales differ", "hang") if family in self.kind), "wrong"
        )


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a program, if anything; whether it was refused in words, or not judged to its end."""

    finding: Finding | None = None
    is_refused: bool = False
    is_unsettled: bool = False


def examine(program: Program, leg: Leg, pool: Pool) -> Verdict:
    """Runs a program on ranks and in one process, up to what is not judged."""
    settled = _settled_part(program)
    outcomes = pool.run(Source(settled))
    finding = judge(settled, leg, outcomes)
    is_refused = any(outcome.error is not None for outcome in outcomes)
    if finding is None and not is_refused:
        finding = _compare_with_undivided(settled, leg, pool, outcomes)
    return Verdict(finding, is_refused, is_unsettled=settled != program)


def _settled_part(program: Program) -> Program:
    """Leaves away the first action that is `Unsettled`, and all behind it: it may hang or end the process."""
    rules = _rules_of(program)
    end = len(program.actions)
    for ranks in _apart(program):
        truth = Truth(program, ranks, rules, ["a"] * len(ranks), lambda said: None)
        for at, action in enumerate(program.actions[:end]):
            try:
                truth.do(at, action, None)
            except Unsettled:
                end = at
                break
            except Exception:  # noqa: BLE001 - `judge` sees it again
                break
    return replace(program, actions=program.actions[:end])


def _compare_with_undivided(program: Program, leg: Leg, pool: Pool, outcomes: Sequence[Outcome]) -> Finding | None:
    """Runs a program without ``shard``, if that promises the same bits, and compares what ranks have."""
    ranks = _apart(program)[0]
    undivided = {}
    for of, wrapped in enumerate(program.optimizers):
        sharers = wrapped.sharers([leg.hosts[rank] for rank in ranks])
        if wrapped.option("shard") is not None:
            # Other engines sum in another order where each rank gets a part alone; and the norm is that of all parts.
            # So they do where parameters have other places in buckets, as those that are divided whole.
            is_gloo = leg.engine == "gloo" and (sharers == len(ranks) or wrapped.kind in ("Normed", "Adafactor"))
            # What a codec keeps depends on when a state is loaded, of a step that is being sent.
            is_timed = wrapped.option("compression") is not None and "16" not in wrapped.option("compression")
            if is_gloo or is_timed or wrapped.option("max_norm"):
                return None
            undivided[of] = sharers > 1
    # A sparse average is made dense, which optimizers update by other formulas.
    if not undivided or any(param.kind == "sparse" for param in program.params):
        return None
    others = pool.run(Source(program, undivided))
    if any(other.error is not None or other.stack is not None for other in others):
        return Finding("error without shard", _errors_of(others))
    for rank in ranks:
        for own, other in zip(outcomes[rank].records, others[rank].records, strict=True):
            for name, param in own.params.items():
                if not is_same(param, other.params[name]):
                    words = f"{shown(param)}, and without shard {shown(other.params[name])}"
                    return Finding(
                        "bits are not those without shard", f"action {own.at}, rank {rank}: {name} is {words}"
                    )
            if own.state is not None and other.state is not None:
                said = difference_of_states(own.state, other.state, lambda number, tensor: 0.0)
                if said is not None:
                    return Finding("state is not that without shard", f"action {own.at}, rank {rank}: {said}")
    return None


def _rules_of(program: Program) -> Rules:
    return Rules([wrapped.option("backward_passes_per_step", 1) for wrapped in program.optimizers], program.size)


def _apart(program: Program) -> list[tuple[int, ...]]:
    """Returns the ranks that average with each other: the members of the process set, and each other rank alone."""
    members = tuple(range(program.size)) if program.members is None else program.members
    return [members, *((rank,) for rank in range(program.size) if rank not in members)]


def judge(program: Program, leg: Leg, outcomes: Sequence[Outcome]) -> Finding | None:
    """Returns what is wrong with these outcomes; None if nothing is."""
    apart = _apart(program)
    rules = _rules_of(program)
    said: list[str] = []
    raised: BaseException | None = None
    raised_at = len(program.actions)
    for ranks in apart:
        truth = Truth(program, ranks, rules, [leg.hosts[rank] for rank in ranks], said.append)
        different = _different_ranks(program, [outcomes[rank] for rank in ranks], ranks)
        recorded = {record.at: record for record in outcomes[ranks[0]].records}
        # Ranks that raise an error have nothing to compare after it.
        ends = [outcome.at for outcome in outcomes if outcome.error is not None and not _is_echo(outcome.error)]
        for at, action in enumerate(program.actions):
            is_compared = at in recorded and not (ends and at >= min(ends))
            if (ends and at > max(ends)) or (_is_recorded(action) and not is_compared and not ends):
                break
            try:
                truth.do(at, action, recorded[at] if is_compared else None)
            except Exception as error:  # noqa: BLE001 - torch refuses the program
                # The other ranks may have been refused before these came so far.
                if at < raised_at:
                    raised, raised_at = error, at
                break
            if is_compared and at in different and not said:
                said.append(different[at])
            if said:
                if any(outcome.stack is not None for outcome in outcomes):
                    break
                return Finding(_kind_of(said[0]), f"action {at}: " + "; ".join(said))
    return _judge_ends(outcomes, rules.excuse, raised, raised_at)


def _is_recorded(action: Action) -> bool:
    return isinstance(action, Step | Join | Consolidate)


def _different_ranks(program: Program, outcomes: Sequence[Outcome], ranks: Sequence[int]) -> dict[int, str]:
    """Returns where the ranks' records differ, by action."""
    different: dict[int, str] = {}
    first = {record.at: record for record in outcomes[0].records}
    for rank, outcome in zip(ranks[1:], outcomes[1:], strict=True):
        for record in outcome.records:
            other = first.get(record.at)
            if other is None:
                continue
            for what, own, others in (
                ("parameter", record.params, other.params),
                ("gradient", record.grads, other.grads),
                ("gradient", record.before or {}, other.before or {}),
            ):
                if what == "gradient" and _keeps_own(program, record.at):
                    continue
                for name in own:
                    if not is_same(own[name], others[name]):
                        words = f"{shown(others[name])} on rank {ranks[0]}, {shown(own[name])} on rank {rank}"
                        different.setdefault(record.at, f"the {what} {name} differs: {words}")
            if record.state is not None and other.state is not None:
                said = difference_of_states(record.state, other.state, lambda number, tensor: 0.0)
                if said is not None:
                    different.setdefault(record.at, f"the consolidated state of the ranks differs: {said}")
            if (record.rates, record.scale) != (other.rates, other.scale):
                words = f"rates or scales differ: {other.rates, other.scale} and {record.rates, record.scale}"
                different.setdefault(record.at, words)
    return different


def _keeps_own(program: Program, at: int) -> bool:
    """Whether ranks have gradients of their own after a step: with Adasum, or those of the steps before a join."""
    action = program.actions[at]
    assert isinstance(action, Step | Join | Consolidate), "others are not recorded"
    return isinstance(action, Join) or "Adasum" in str(program.optimizers[action.of].option("op"))


def _judge_ends(
    outcomes: Sequence[Outcome], excuse: str | None, raised: BaseException | None, raised_at: int
) -> Finding | None:
    """Judges how the ranks have ended; ``raised`` is what one process raises, at the action ``raised_at``."""
    stacks = [(rank, outcome.stack) for rank, outcome in enumerate(outcomes) if outcome.stack is not None]
    stuck = [rank for rank, outcome in enumerate(outcomes) if not outcome.has_ended]
    finding = None
    if stacks:
        words = "\n".join(f"rank {rank} hangs:\n{stack}" for rank, stack in stacks)
        kind = "hang that does not end when the world is ended" if stuck else "hang"
        finding = Finding(kind, f"{words}\n{_errors_of(outcomes)}")
    elif any(outcome.error is not None for outcome in outcomes):
        finding = _judge_errors(outcomes, excuse, raised)
    elif raised is not None:
        finding = Finding("no error", f"action {raised_at}: one process raises {raised!r}, and the ranks do not")
    return finding


def _judge_errors(outcomes: Sequence[Outcome], excuse: str | None, raised: BaseException | None) -> Finding | None:
    own = [outcome.error for outcome in outcomes if outcome.error is not None and not _is_echo(outcome.error)]
    if not own:
        own = [outcome.error for outcome in outcomes if outcome.error is not None]
    elif any(type(error) is type(raised) or _is_of_threads(error) for error in own):
        return None
    elif all(isinstance(error, HvdliteError | ValueError) for error in own):
        if any(outcome.error is None for outcome in outcomes):
            return Finding("error on some ranks", f"{_errors_of(outcomes)}; excuse: {excuse}")
        if excuse is not None:
            return None
    wordless = [error for error in own if not isinstance(error, HvdliteError | ValueError)]
    return Finding(f"error: {_kind_of(repr((wordless or own)[0]))}", _errors_of(outcomes))


def _is_echo(error: BaseException) -> bool:
    """Whether this only says that another rank has ended."""
    return isinstance(error, CommunicationError)


def _is_of_threads(error: BaseException | None) -> bool:
    """Whether this comes of ranks that are threads: one listed all objects while another was making a tuple."""
    return isinstance(error, SystemError) and "tupleobject" in str(error)


def _errors_of(outcomes: Sequence[Outcome]) -> str:
    return "; ".join(f"rank {rank}, action {outcome.at}: {outcome.error!r}" for rank, outcome in enumerate(outcomes))


def _kind_of(words: str) -> str:
    """Leaves away numbers and names."""
    words = re.sub(r"\bis (None|\[).*", lambda match: "is None" if match[1] == "None" else "is wrong", words)
    words = re.sub(r"differs:.*", "differs", words, flags=re.DOTALL)
    words = re.sub(r"\b[wt]\d+\b", "w", words)
    return re.sub(r"-?\d+(\.\d+)?", "#", words)[:90]
