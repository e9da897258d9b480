"""Random programs train on ranks as in one process; and what says so finds faults, and makes them small."""

from __future__ import annotations

import contextlib
import io
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from long_run import IS_LONG, trials

from fuzz import prelude
from fuzz.campaign import run, smallest
from fuzz.drawing import draw_program
from fuzz.judge import examine
from fuzz.pool import LEGS, Pool
from fuzz.program import Backward, Param, Program, Step, Term, Wrapped
from fuzz.rules import Rules
from fuzz.shrinking import size_of
from fuzz.source import Source, runnable
from fuzz.truth import Truth
from hvdlite.buckets.bucket import Bucket
from hvdlite.buckets.gradient_state import GradientState
from hvdlite.exchanges.builtin_exchanges import AllReduce
from hvdlite.optim.reducer import Reducer
from hvdlite.steps.averaged_step import AveragedStep
from hvdlite.steps.step_world import StepState

# Programs use what hvdlite and torch warn of.
pytestmark = pytest.mark.filterwarnings("ignore")

# About 300 in all; in the long run 10,000, others on each day.
SEEDS = trials(38, 1250)
START = int(time.time()) // 86400 * 100_000 if IS_LONG else 0


@pytest.mark.slow
@pytest.mark.parametrize("leg", LEGS)
def test_ranks_train_as_one_process_does_or_say_why_not(leg):
    result = run(LEGS[leg], range(START, START + SEEDS))
    for program, finding in result.findings.values():
        small, again = smallest(program, finding, LEGS[leg])
        pytest.fail(f"{leg}, seed {program.seed}: {finding.words}\nmade small: {again.words}\n\n{runnable(small)}")
    assert result.programs == SEEDS
    assert result.refused + result.unsettled < SEEDS / 2, "most programs are compared to their end"


def divides_by_too_much(patch: pytest.MonkeyPatch) -> None:
    begin = AllReduce.begin

    def begin_smaller(self: AllReduce, gradients: Any, links: Any) -> Any:
        begun = begin(self, gradients, links)
        finish = begun.finish

        def finish_smaller(count: Any) -> None:
            finish(count)
            gradients.flat.mul_(0.9)

        begun.finish = finish_smaller
        return begun

    patch.setattr(AllReduce, "begin", begin_smaller)


def loses_what_had_too_few_passes(patch: pytest.MonkeyPatch) -> None:
    fill = Bucket._fill

    def forget_and_fill(self: Bucket, state: GradientState) -> bool:
        if not state.ready:
            state.param.grad = None
        return fill(self, state)

    patch.setattr(Bucket, "_fill", forget_and_fill)


def gives_one_rank_other_bits(patch: pytest.MonkeyPatch) -> None:
    attempt = AveragedStep.attempt

    def attempt_nearly(self: AveragedStep, *arguments: Any) -> None:
        attempt(self, *arguments)
        if self.plan.ranks.rank == 1:
            for state in self.plan.layout.states.values():
                if state.param.grad is not None and not state.param.grad.is_sparse:
                    state.param.grad.mul_(1 + 4 * torch.finfo(state.param.dtype).eps)

    patch.setattr(AveragedStep, "attempt", attempt_nearly)


def raises_without_words(patch: pytest.MonkeyPatch) -> None:
    def no_sync(self: StepState) -> Any:
        raise KeyError(self)

    patch.setattr(StepState, "accumulating", no_sync)


def leaves_a_rank_waiting(patch: pytest.MonkeyPatch) -> None:
    synchronize = Reducer.synchronize

    def synchronize_alone(self: Reducer, *arguments: Any, **more: Any) -> None:
        if self.engine.ranks.rank == 1:
            # No other rank comes to this.
            self.engine.ranks.all_reduce(torch.zeros(1), "what hangs").wait()
        synchronize(self, *arguments, **more)

    patch.setattr(Reducer, "synchronize", synchronize_alone)


@pytest.mark.parametrize(
    ("breaks", "family", "most"),
    [
        (divides_by_too_much, "wrong", 5),
        (loses_what_had_too_few_passes, "wrong", 6),
        (gives_one_rank_other_bits, "differs", 5),
        (raises_without_words, "KeyError", 5),
    ],
)
def test_a_fault_of_hvdlite_is_found_and_made_small(monkeypatch, breaks: Callable[..., None], family: str, most: int):
    breaks(monkeypatch)
    result = run(LEGS["gloo2"], range(60), deadline_s=2.0, stop_at=1)
    ((program, finding),) = result.findings.values()
    small, again = smallest(program, finding, LEGS["gloo2"])
    assert again.family == finding.family == family
    assert size_of(small) <= most, Source(small).text
    monkeypatch.undo()
    # What is printed for it runs, here at one rank.
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(runnable(small), "program.py", "exec"), {})
    assert out.getvalue().count("action") == len(small.params) * sum(isinstance(each, Step) for each in small.actions)


def test_a_program_that_hangs_is_ended_with_the_stacks_and_the_next_one_runs(monkeypatch):
    leg, sgd = LEGS["gloo2"], Wrapped("SGD", (("lr", 1.0),), (("w0",),))
    passes = [Backward((Term("w0", batch),)) for batch in (5, 6)]
    program = Program(2, (Param("w0", (3,)),), (sgd,), (passes[0], Step(0), passes[1], Step(0)))
    with Pool(leg) as pool:
        # The first program of a process waits for imports.
        assert examine(program, leg, pool).finding is None
        leaves_a_rank_waiting(monkeypatch)
        pool.deadline_s = 1.0
        finding = examine(program, leg, pool).finding
        assert finding is not None
        assert finding.family == "hang"
        assert "rank 0 hangs" in finding.words
        assert "opt0.step()" in finding.words
        monkeypatch.undo()
        pool.deadline_s = 20.0
        assert examine(program, leg, pool).finding is None
        assert pool.lost == 0


def test_the_truth_is_the_gradient_of_the_mean_loss_of_all_ranks():
    terms = (Term("w0", 5), Term("w1", 6, ranks=(1,)))
    program = Program(
        3,
        (Param("w0", (3,)), Param("w1", (2, 2)), Param("w2", (1,))),
        (Wrapped("SGD", (("lr", 1.0),), (("w0", "w1", "w2"),)),),
        (Backward(terms), Step(0)),
    )
    found: list[str] = []
    truth = Truth(program, range(3), Rules([1], 3), "aaa", found.append)
    params = [prelude.param(each.shape, number) for number, each in enumerate(program.params)]
    losses = [prelude.use(params[0], 5, rank) for rank in range(3)]
    (sum([*losses, prelude.use(params[1], 6, 1)]) / 3).backward()
    for at, action in enumerate(program.actions):
        truth.do(at, action, None)
    torch.testing.assert_close(truth.grads[2]["w0"], params[0].grad)
    torch.testing.assert_close(truth.params["w1"].detach(), params[1].detach() - params[1].grad)
    assert truth.grads[0]["w2"] is None
    assert not found


def test_a_seed_is_always_the_same_program():
    for seed in range(50):
        assert draw_program(seed, 3) == draw_program(seed, 3)
        assert Source(draw_program(seed, 3)).text == Source(draw_program(seed, 3)).text


def test_programs_have_all_that_they_can_have():
    drawn: Counter[str] = Counter()
    for seed in range(400):
        program = draw_program(seed, 3)
        drawn.update({type(action).__name__ for action in program.actions})
        drawn.update({action.how for action in program.actions if isinstance(action, Step)})
        drawn.update({f"{param.kind} {param.dtype}" for param in program.params})
        drawn.update({name for wrapped in program.optimizers for name, _ in wrapped.options})
        drawn.update({wrapped.kind for wrapped in program.optimizers})
        drawn.update({str(wrapped.option("compression")).split("(")[0] for wrapped in program.optimizers})
        drawn.update({f"{len(program.optimizers)} optimizers", f"members {program.members is not None}"})
    often = """
        Backward Step ZeroGrad Freeze SetGrad AddParam Reload Read SetRate Collective Join
        plain synchronize clip twice closure scaler unscale
        SGD AdamW Adagrad op backward_passes_per_step bucket_cap_mb groups sparse_as_dense gradient_predivide_factor
        step_on_arrival max_norm exchange
        shard Normed Consolidate hvd.Compression.int8 hvd.Compression.int4 hvd.Compression.topk
        hvd.Compression.powersgd hvd.Compression.fp16 hvd.Compression.bf16
    """
    for each in often.split():
        assert drawn[each] >= 5, each
    for each in ("sparse float32", "channels_last float64", "transposed float32", "plain bfloat16", "plain complex64"):
        assert drawn[each] >= 3, each
    assert drawn["2 optimizers"] > 50
    assert drawn["members True"] > 10
