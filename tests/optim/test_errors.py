"""Invalid input gives an error on every rank that names the parameter or argument, the cause and the way out."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import alike
from ranks import attempt_ranks, run_ranks, set_of
from torch import nn
from training import wrap

import hvdlite as hvd
from hvdlite.comm.group import Group


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape or (2,)))


@pytest.mark.parametrize(
    "function", ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "barrier"]
)
def test_functions_before_init_say_what_to_call(function):
    with pytest.raises(hvd.NotInitializedError, match=r"use hvd.init\(\)") as caught:
        getattr(hvd, function)()
    assert isinstance(caught.value, ValueError), "what Horovod raises"


def test_collectives_and_the_optimizer_before_init_say_what_to_call():
    model = nn.Linear(2, 2)
    for call in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.allgather(torch.ones(1)),
        lambda: hvd.broadcast(torch.ones(1), 0),
        lambda: hvd.broadcast_parameters(model.state_dict()),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        lambda: hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=1.0)),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0)),
    ):
        with pytest.raises(hvd.NotInitializedError):
            call()


CONSTRUCTION_ERRORS = [
    ({"named_parameters": [weight(), weight()]}, "tuples .name, parameter.*Found Parameter of shape"),
    ({"named_parameters": ["w"]}, "tuples .name, parameter"),
    ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
    ({"backward_passes_per_step": 1.5}, "backward_passes_per_step must be > 0"),
    ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "not supported with op != Average"),
    ({"gradient_predivide_factor": 0.0}, "not a positive number"),
    ({"op": 7}, "op=7"),
    ({"groups": 0}, "groups should be a non-negative integer or a list of list of torch.Tensor."),
    ({"groups": "all"}, "groups should be a non-negative integer or a list of list of torch.Tensor."),
    ({"groups": [weight()]}, "Entry 0 is Parameter"),
    ({"groups": [["w"]]}, "groups must consist of torch.Tensor"),
    ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
    ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25'"),
    ({"autotune": "yes"}, "autotune=.yes. is neither True nor False"),
    ({"autotune": True, "bucket_cap_mb": 8}, "autotune=True: bucket_cap_mb=8 already sets .* leave out one of the two"),
    ({"autotune": True, "op": hvd.Adasum}, "autotune=True: with op=hvd.Adasum nothing is sent during backward"),
]


@pytest.mark.parametrize(("options", "words"), CONSTRUCTION_ERRORS)
def test_wrong_arguments_are_value_errors_on_every_rank(options, words):
    outcomes = attempt_ranks(2, lambda group: wrap(group, [weight(), weight()], **options))
    for outcome in outcomes:
        assert isinstance(outcome, ValueError)
        with pytest.raises(ValueError, match=words):
            raise outcome


@pytest.mark.parametrize("compression", ["fp16", None, hvd.Compression, hvd.Compression.topk, 16])
def test_an_unknown_compression_is_an_error_that_lists_the_known_ones(compression):
    with pytest.raises(
        TypeError, match=r"use hvd\.Compression\.none, \.fp16, \.bf16, \.int8, \.int4, \.topk\(\) or \.powersgd\(\)"
    ):
        run_ranks(2, lambda group: wrap(group, [weight()], compression=compression))


def test_names_that_are_not_unique_are_listed():
    a, b = weight(), weight()
    with pytest.raises(ValueError, match=r"must be unique\. Found duplicates: same"):
        run_ranks(1, lambda group: wrap(group, [a, b], named_parameters=[("same", a), ("same", b)]))


def test_parameters_without_a_name_are_told_by_place_and_shape_never_by_object_id():
    a, b = weight(), weight(3, 4)
    with pytest.raises(ValueError, match="were not named") as caught:
        run_ranks(1, lambda group: wrap(group, [a, b], named_parameters=[("a", a)]))
    assert "param_groups[0]['params'][1]" in str(caught.value)
    assert "(3, 4)" in str(caught.value)
    assert str(id(b)) not in str(caught.value)


def test_parameters_without_a_name_are_told_by_the_optimizers_own_names_if_it_has_them():
    model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"'bias', shape \(3,\)"):
        run_ranks(
            1,
            lambda group: wrap(group, model.named_parameters(), [("weight", model.weight)]),
        )


def test_groups_that_overlap_are_an_error_that_names_the_parameter():
    a, b = weight(), weight()
    with pytest.raises(ValueError, match=r"only appear once in groups\. 'b' appears again in group 1"):
        run_ranks(1, lambda g: wrap(g, [a, b], named_parameters=[("a", a), ("b", b)], groups=[[a, b], [b]]))


def test_lbfgs_and_things_that_are_no_optimizer_are_refused():
    with pytest.raises(ValueError, match="LBFGS cannot be wrapped"):
        run_ranks(1, lambda group: hvd.DistributedOptimizer(torch.optim.LBFGS([weight()]), process_set=set_of(group)))
    with pytest.raises(TypeError, match=r"Linear is not a torch\.optim\.Optimizer"):
        run_ranks(1, lambda group: hvd.DistributedOptimizer(nn.Linear(1, 1), process_set=set_of(group)))
    with pytest.raises(ValueError, match="already"):
        run_ranks(1, lambda g: hvd.DistributedOptimizer(wrap(g, [weight()]), process_set=set_of(g)))


@pytest.mark.parametrize("size", [2, 3])
def test_models_that_differ_name_the_first_difference_both_shapes_and_both_ranks(size):
    def rank(group: Group):
        hidden = 5 if group.rank == size - 1 else 4
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, hidden))
        wrap(group, model.parameters(), named_parameters=model.named_parameters()).step()

    for outcome in attempt_ranks(size, rank):
        assert isinstance(outcome, hvd.MismatchError)
        for words in ("'1.weight'", "(4, 3)", "(5, 3)", "rank 0 (node0)", f"rank {size - 1} (node{size - 1})"):
            assert words in str(outcome)


def test_a_model_with_one_parameter_more_names_it():
    def rank(group: Group):
        model = nn.Linear(2, 2, bias=group.rank == 1)
        wrap(group, model.parameters(), named_parameters=model.named_parameters()).step()

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "'bias' has no such parameter" in str(outcome)


@pytest.mark.parametrize("attribute", ["dtype", "frozen", "layout"])
def test_models_that_differ_in_more_than_shape_are_told_apart(attribute):
    def rank(group: Group):
        model = nn.Conv2d(2, 2, 2, bias=False)
        if group.rank == 1 and attribute == "dtype":
            model.double()
        if group.rank == 1 and attribute == "frozen":
            model.requires_grad_(False)
        if group.rank == 1 and attribute == "layout":
            model.to(memory_format=torch.channels_last)
        wrap(group, model.parameters(), named_parameters=model.named_parameters()).step()

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "'weight'" in str(outcome)


@pytest.mark.parametrize(
    "option",
    [
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
        {"backward_passes_per_step": 2},
        {"bucket_cap_mb": 1.0},
        {"autotune": True},
        {"groups": 1},
        {"sparse_as_dense": True},
    ],
)
def test_arguments_that_differ_between_ranks_are_an_error_on_all(option):
    def rank(group: Group):
        wrap(group, [weight()], **(option if group.rank == 1 else {})).step()

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "rank 1 (node1)" in str(outcome)


def test_more_backward_passes_than_announced_name_the_parameter_and_the_way_out():
    def rank(group: Group):
        model = nn.Linear(2, 1, bias=False)
        optimizer = wrap(group, model.parameters(), named_parameters=model.named_parameters())
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, hvd.GradientError)
        assert "'weight'" in str(outcome)
        assert "backward_passes_per_step=1" in str(outcome)
        assert "no_sync" in str(outcome)


@pytest.mark.parametrize("size", [1, 2])
def test_zero_grad_while_gradients_are_in_flight_is_an_error_and_the_step_still_works(size):
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        (param.sum() * (1 + group.rank)).backward()
        with pytest.raises(
            hvd.GradientError,
            match=r"optimizer.zero_grad\(\) was called after loss.backward\(\) but before.*param_groups",
        ):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        return param.tolist()

    mean = (size + 1) / 2
    assert run_ranks(size, rank) == [[-mean, -mean]] * size


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda param: nn.utils.clip_grad_norm_([param], 0.1),
        lambda param: nn.utils.clip_grad_value_([param], 0.1),
        lambda param: param.grad.zero_(),
        lambda param: setattr(param, "grad", param.grad * 2),
        lambda param: setattr(param, "grad", None),
    ],
    ids=["clip_grad_norm_", "clip_grad_value_", "zero_", "assignment", "None"],
)
def test_gradients_changed_on_their_way_are_an_error_and_no_silent_divergence(size, change):
    def rank(group: Group):
        model = alike(nn.Linear(2, 1, bias=False))
        optimizer = wrap(group, model.parameters(), named_parameters=model.named_parameters())
        model(torch.ones(1, 2)).sum().backward()
        change(model.weight)
        with pytest.raises(
            hvd.GradientError, match=r"weight was (changed|replaced|set to None).*call optimizer\.synchronize\(\)"
        ):
            optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.synchronize()
        change(model.weight)
        with optimizer.skip_synchronize():
            optimizer.step()

    run_ranks(size, rank)


class PromptEngine:
    """An engine whose all-reduces are done when they have begun, so that averages arrive during backward."""

    def __init__(self, engine):
        self._engine = engine

    def allreduce(self, tensors, options):
        work = self._engine.allreduce(tensors, options)
        work.wait()
        return work

    def __getattr__(self, name):
        return getattr(self._engine, name)


@pytest.mark.parametrize("change", [lambda p: p.grad.zero_(), lambda p: setattr(p, "grad", None)])
def test_gradients_whose_average_is_there_before_the_others_are_not_to_be_changed_either(change):
    def rank(group: Group):
        model = alike(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4))))
        optimizer = wrap(group, model.parameters(), named_parameters=model.named_parameters(), bucket_cap_mb=1e-5)
        # In the first step, no average arrives before all gradients are there.
        optimizer._reducer.connect()
        model(torch.ones(1, 2)).sum().backward()
        if group.rank == 1:
            # The first gradient that is ready, and so the first average.
            change(model[3].weight)
        optimizer.step()

    first, second = attempt_ranks(2, rank, lambda: PromptEngine)
    assert first is None
    assert isinstance(second, hvd.GradientError)
    assert "3.weight" in str(second)


def test_after_a_backward_pass_too_many_the_step_can_be_dropped_and_not_be_taken():
    def rank(group: Group):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = wrap(group, model.parameters(), named_parameters=model.named_parameters())

        def backward() -> None:
            (model(torch.ones(1, 2)).sum() * (1 + group.rank)).backward()

        for _ in range(2):
            backward()
            with pytest.raises(hvd.GradientError, match="more than backward_passes_per_step times"):
                backward()
            optimizer.synchronize()
            optimizer.zero_grad()
        backward()
        optimizer.step()
        optimizer.zero_grad()
        backward()
        with pytest.raises(hvd.GradientError, match="more than backward_passes_per_step times"):
            backward()
        for _ in range(2):
            with pytest.raises(hvd.GradientError, match=r"spoilt.*optimizer\.zero_grad\(\) on every rank"):
                optimizer.step()
        optimizer.zero_grad()
        backward()
        optimizer.step()
        return model.weight.flatten().tolist()

    assert run_ranks(2, rank) == [[-3.0, -3.0]] * 2


def test_a_hook_of_the_users_that_changes_gradients_is_refused_after_wrapping_and_obeyed_before():
    def rank(group: Group):
        late, early = weight(), weight()

        def clamp(param: torch.Tensor) -> None:
            param.grad.clamp_(-0.1, 0.1)

        early.register_post_accumulate_grad_hook(clamp)
        optimizer = wrap(group, [early])
        early.sum().backward()
        optimizer.step()
        optimizer = wrap(group, [late])
        late.register_post_accumulate_grad_hook(clamp)
        with pytest.raises(hvd.GradientError, match=r"before hvd\.DistributedOptimizer"):
            late.sum().backward(), optimizer.step()
        return early.tolist()

    for value in run_ranks(2, rank):
        assert value == pytest.approx([-0.1, -0.1])


def test_a_second_optimizer_over_the_same_parameters_takes_them_over():
    def rank(group: Group):
        param = weight()
        first = wrap(group, [param])
        second = wrap(group, [param])
        (param.sum() * (1 + group.rank)).backward()
        second.step()
        with pytest.raises(hvd.GradientError, match="it was closed, or a newer one has the same parameters"):
            first.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-1.5, -1.5]] * 2


def test_zero_grad_in_the_middle_of_an_accumulation_starts_it_again():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param], backward_passes_per_step=2)
        param.sum().backward()
        optimizer.zero_grad()
        for _ in range(2):
            param.sum().backward()
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-2.0, -2.0]] * 2


def test_a_step_that_skips_the_averages_under_way_is_an_error():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        param.sum().backward()
        with pytest.raises(hvd.GradientError, match="skip_synchronize"), optimizer.skip_synchronize():
            optimizer.step()
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-1.0, -1.0]] * 2


def test_skip_synchronize_ends_with_its_block_also_when_an_exception_does():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        with pytest.raises(RuntimeError, match="inside"), optimizer.skip_synchronize():
            raise RuntimeError("inside")
        (param.sum() * (1 + group.rank)).backward()
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-1.5, -1.5]] * 2


def test_converting_the_model_after_wrapping_is_an_error_that_names_the_parameter():
    def rank(group: Group):
        model = nn.Linear(2, 1, bias=False)
        optimizer = wrap(group, model.parameters(), named_parameters=model.named_parameters())
        model.double()
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()

    for outcome in attempt_ranks(2, rank):
        assert isinstance(outcome, hvd.GradientError)
        assert "'weight'" in str(outcome)


def test_an_optimizer_with_ranks_of_its_own_refuses_to_be_pickled():
    import pickle  # noqa: PLC0415 - used nowhere else

    with pytest.raises(TypeError, match="cannot be pickled"):
        run_ranks(1, lambda group: pickle.dumps(wrap(group, [weight()])))


@pytest.mark.parametrize("root", [-1, 2, "0", True, None])
def test_a_root_that_is_no_rank_is_an_error(root):
    with pytest.raises(ValueError, match="is not one of the 2 ranks, 0 to 1"):
        run_ranks(2, lambda group: hvd.broadcast_object(1, root, process_set=set_of(group)))


class NeverEnding:
    """An engine whose all-reduces begin and whose waits raise, as if each wait were interrupted."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.begun: list[torch.Tensor] = []
        self.interrupts = True

    def allreduce(self, tensors, options):
        work = self._engine.allreduce(tensors, options)
        if tensors[0].is_floating_point() and self.interrupts:
            self.begun += tensors
            return self
        return work

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise KeyboardInterrupt

    def __getattr__(self, name):
        return getattr(self._engine, name)


def test_what_is_under_way_when_a_step_is_given_up_writes_into_no_later_gradient():
    def rank(group: Group) -> list[float]:
        params = [nn.Parameter(torch.zeros(64)) for _ in range(3)]
        optimizer = wrap(group, params, bucket_cap_mb=1e-4)
        sum(param.sum() for param in params).backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        engine = optimizer._reducer.engine.group.engine
        assert len(engine.begun) == 3
        engine.interrupts = False
        optimizer.zero_grad()
        (sum(param.sum() for param in params) * 2.0).backward()
        for late in engine.begun:
            late.fill_(float("nan"))
        optimizer.step()
        return [param.unique().item() for param in params]

    assert run_ranks(2, rank, lambda: NeverEnding) == [[-2.0] * 3] * 2


class TellingLock:
    """A lock that reports when a thread has to wait for it."""

    def __init__(self, lock: Any, waits: threading.Event) -> None:
        self._lock, self._waits = lock, waits

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waits.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_gradients_that_come_at_once_from_two_devices_are_taken_one_after_the_other():
    def rank(group: Group) -> None:
        first, second = weight(), weight()
        optimizer = wrap(group, [first, second])
        for param in (first, second):
            param.grad = torch.ones(2)
        reducer = optimizer._reducer
        waits, order, other = threading.Event(), [], None
        reducer._lock = TellingLock(reducer._lock, waits)
        begin_step = reducer.begin_step

        def begin() -> None:
            # While the first thread's gradient is handled, the second thread's comes.
            nonlocal other
            assert other is None, "two gradients begin the same step"
            other = threading.Thread(target=come, args=("second", second))
            other.start()
            assert waits.wait(60), "it need not wait"
            begin_step()

        def come(name: str, param: nn.Parameter) -> None:
            reducer.on_gradient(param)
            order.append(name)

        reducer.begin_step = begin
        come("first", first)
        other.join(60)
        assert sorted(order) == ["first", "second"]
        reducer.begin_step = begin_step
        optimizer.step()
        assert first.tolist() == second.tolist() == [-1.0, -1.0]

    run_ranks(2, rank)


@pytest.mark.parametrize("model", [nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 1))])
# Horovod raises the one if a module cannot be iterated over, and the other if it can.
@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_a_module_in_the_place_of_named_parameters_is_told_what_is_wanted(model, kind):
    words = rf"Found the module {type(model).__name__}: pass named_parameters=model\.named_parameters\(\)"
    with pytest.raises(kind, match=words):
        run_ranks(1, lambda group: wrap(group, model.parameters(), named_parameters=model))


def test_gradients_that_ddp_averages_too_are_an_error_that_names_ddp(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for bucket_view in (False, True):
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), gradient_as_bucket_view=bucket_view)

            def rank(group: Group, model: nn.Module = model) -> None:
                optimizer = wrap(group, model.parameters())
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

            with pytest.raises(hvd.GradientError, match="Leave DistributedDataParallel out"):
                run_ranks(1, rank)
            del model, rank
    finally:
        dist.destroy_process_group()
