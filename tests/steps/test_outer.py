"""Outer steps: hosts that train apart end where plain lines in one process do; states resume; wrong use is refused."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from equal_states import assert_same
from fake_hosts import PLACES, on
from ranks import attempt_ranks, counting, set_of
from torch import Tensor, nn
from training import take_steps
from worlds import attempt_worlds, run_generations, run_worlds

import hvdlite as hvd
from hvdlite.buckets.settings import Settings
from hvdlite.comm.group import Group
from hvdlite.compression.approximations import TopK
from hvdlite.compression.codecs import wire_bytes
from hvdlite.optim.arguments import check_survivable
from hvdlite.runtime.world import current_world
from hvdlite.steps.outer_bucket import StreamWork

STREAMING = hvd.DiLoCo(sync_every=6, lr=0.7, momentum=0.9, fragments=3, delay=2, mix=0.25)
OUTERS = {
    "LocalSGD": hvd.LocalSGD(sync_every=3),
    "DiLoCo": hvd.DiLoCo(sync_every=4),
    "streaming": STREAMING,
    "overlapping fragments": hvd.DiLoCo(sync_every=4, fragments=4, delay=3),
    "int4": hvd.DiLoCo(sync_every=4, fragments=2, delay=1, compression=hvd.Compression.int4),
    "SparseLoCo": hvd.DiLoCo(3, lr=0.9, momentum=0.0, compression=hvd.Compression.topk(0.2, error_decay=0.9)),
}
INNERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
}
# One bucket for each parameter.
SMALL = {"bucket_cap_mb": 1e-6}


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        param.data = (torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.4).to(dtype)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(model.parameters()).dtype
    samples = torch.randn(5, 6, generator=generator, dtype=torch.float64).to(dtype)
    return (model(samples) - rank).square().mean()


def wrap(group: Group, model: nn.Module, outer: Any, inner: str = "SGD", **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(
        INNERS[inner](model.parameters()),
        model.named_parameters(),
        process_set=set_of(group),
        outer=outer,
        **{**SMALL, **options},
    )


def train(optimizer: torch.optim.Optimizer, model: nn.Module, rank: int, first: int, last: int) -> None:
    take_steps(optimizer, lambda step: loss_of(model, rank, step), range(first, last))


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).clone()


def errors_on(hosts: list[str], function: Callable[[Group], Any]) -> list[BaseException]:
    """Calls the function on ranks of these hosts; returns the error of each."""

    def rank(group: Group) -> Any:
        group.hosts = tuple(hosts)
        return function(group)

    outcomes = attempt_ranks(len(hosts), rank)
    assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    return outcomes


def replicas_of(hosts: list[str]) -> list[list[int]]:
    """The ranks that train together."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    together = list(members.values())
    return together if len({len(ranks) for ranks in together}) == 1 else [[rank] for rank in range(len(hosts))]


def plain_diloco(place: str, outer: Any, inner: str, steps: int) -> tuple[list[Tensor], Tensor]:
    """The parameters of each replica, and the anchor, by the algorithm's plain lines."""
    rule, replicas = outer.rule(), replicas_of(PLACES[place])
    models = [make_model() for _ in replicas]
    inners = [INNERS[inner](model.parameters()) for model in models]
    params = [list(model.parameters())[::-1] for model in models]  # in the order of the buckets
    anchor = [param.detach().clone() for param in params[0]]
    velocity = [torch.zeros_like(each) for each in anchor]
    residual = [[torch.zeros(each.numel(), dtype=each.dtype) for each in anchor] for _ in replicas]
    arriving: dict[int, list[tuple[int, Tensor]]] = {}
    for step in range(1, steps + 1):
        for model, optimizer, ranks in zip(models, inners, replicas, strict=True):
            optimizer.zero_grad()
            (sum(loss_of(model, rank, step - 1) for rank in ranks) / len(ranks)).backward()
            optimizer.step()
        turns = {
            (number + 1) * rule.sync_every // rule.fragments % rule.sync_every: number
            for number in range(rule.fragments)
        }
        for place_of, fragment in turns.items():
            if step % rule.sync_every == place_of:
                for number in range(fragment, len(anchor), rule.fragments):
                    deltas = [anchor[number] - own[number].detach() for own in params]
                    if isinstance(rule.compression, hvd.Codec):
                        deltas = [
                            through(rule.compression, delta, kept[number])
                            for delta, kept in zip(deltas, residual, strict=True)
                        ]
                    if isinstance(rule.compression, TopK):
                        deltas = [
                            largest_of(rule.compression, delta, kept[number], len(replicas[0]))
                            for delta, kept in zip(deltas, residual, strict=True)
                        ]
                    arriving.setdefault(step + rule.delay, []).append((number, sum(deltas) / len(deltas)))
        for number, average in arriving.pop(step, []):
            velocity[number] = rule.momentum * velocity[number] + average
            anchor[number] = anchor[number] - rule.lr * (average + rule.momentum * velocity[number])
            for own in params:
                own[number].data = rule.mix * own[number].data + (1 - rule.mix) * anchor[number]
    return [values_of(model) for model in models], torch.cat([each.reshape(-1) for each in anchor[::-1]])


def through(codec: Any, values: Tensor, residual: Tensor) -> Tensor:
    """What a wire holds of these values and their residual, which is changed."""
    wire, out = torch.empty(wire_bytes(codec, values.numel()), dtype=torch.uint8), torch.empty_like(values)
    codec.encode_all(values.reshape(-1), wire, residual)
    codec.add_decoded([wire], out.view(-1))
    return out


def largest_of(form: Any, values: Tensor, residual: Tensor, ranks: int) -> Tensor:
    """What is sent of these values and their residual, which is changed; each rank of a host has a part of them."""
    sent = torch.zeros_like(residual)
    wanted = residual.mul_(form.error_decay).add_(values.reshape(-1))
    each = -(-len(wanted) // ranks)
    for start in range(0, len(wanted), each):
        part = wanted[start : start + each]
        places = start + part.abs().topk(math.ceil(form.density * len(part))).indices
        sent[places] = wanted[places].bfloat16().double()
    wanted.sub_(sent)
    return sent.view_as(values)


@pytest.mark.night(but=10)
@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    ("place", "inner", "name"),
    [
        *[(place, "SGD", "streaming") for place in PLACES],
        *[(place, "AdamW", "SparseLoCo") for place in PLACES if place != "2 hosts of 2"],
        *[("2 hosts of 2", "AdamW", name) for name in OUTERS if name != "int4"],
        ("3 hosts", "AdamW", "DiLoCo"),
        ("2 hosts", "SGD", "LocalSGD"),
    ],
)
def test_hosts_train_as_plain_lines_in_one_process_do(place, inner, name):
    steps = 15

    def rank(group: Group) -> Any:
        model = make_model()
        optimizer = wrap(group, model, OUTERS[name], inner)
        train(optimizer, model, group.rank, 0, steps)
        with optimizer.averaged():
            anchor = values_of(model)
        return values_of(model), anchor

    found = on(place, rank)
    models, anchor = plain_diloco(place, OUTERS[name], inner, steps)
    for number, ranks in enumerate(replicas_of(PLACES[place])):
        for each in ranks:
            assert torch.allclose(found[each][0], models[number], rtol=0, atol=1e-12)
    assert all(torch.equal(own, found[0][1]) for _, own in found)
    assert torch.allclose(found[0][1], anchor, rtol=0, atol=1e-12)


def test_outer_gradients_of_4_bits_are_those_of_plain_lines_with_error_feedback():
    def rank(group: Group) -> Any:
        model = make_model()
        optimizer = wrap(group, model, OUTERS["int4"])
        train(optimizer, model, group.rank, 0, 20)
        return values_of(model)

    expected, _ = plain_diloco("2 hosts", OUTERS["int4"], "SGD", 20)
    for own, plain in zip(on("2 hosts", rank), expected, strict=True):
        assert torch.allclose(own, plain, rtol=0, atol=1e-12)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("place", "compression", "dtype"),
    [
        *[(place, "int4", torch.float32) for place in PLACES],
        *[("2 hosts of 2", compression, torch.bfloat16) for compression in ("none", "int8")],
        *[("3 hosts", compression, torch.float32) for compression in ("fp16", "bf16", "int8")],
    ],
)
def test_in_any_format_all_ranks_share_the_bits_of_the_anchor_and_learn(place, compression, dtype):
    outer = hvd.DiLoCo(sync_every=3, fragments=2, delay=1, compression=getattr(hvd.Compression, compression))

    def rank(group: Group) -> Any:
        model = make_model(dtype)

        def loss() -> float:
            return sum(loss_of(model, each, 0).item() for each in range(group.size))

        before = loss()
        optimizer = wrap(group, model, outer, "AdamW")
        train(optimizer, model, group.rank, 0, 20)
        with optimizer.averaged():
            return values_of(model), before, loss()

    (first, before, after), *others = on(place, rank)
    assert all(torch.equal(own, first) for own, _, _ in others)
    assert after < before


def test_local_sgd_sets_the_parameters_to_their_average():
    def rank(group: Group) -> Any:
        model = make_model()
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=4))
        train(optimizer, model, group.rank, 0, 3)
        alone = copy.deepcopy(model), copy.deepcopy(optimizer._optimizer.state_dict())
        train(optimizer, model, group.rank, 3, 4)
        own = INNERS["SGD"](alone[0].parameters())
        own.load_state_dict(alone[1])
        train(own, alone[0], group.rank, 3, 4)
        return values_of(alone[0]), values_of(model)

    found = on("3 hosts", rank)
    average = sum(alone for alone, _ in found) / 3
    assert not torch.allclose(found[0][0], average, atol=1e-6)
    for _, averaged in found:
        assert torch.allclose(averaged, average, rtol=0, atol=1e-14)


def test_an_outer_step_after_every_step_is_plain_averaging_for_sgd():
    def rank(group: Group) -> Any:
        found = []
        for outer in (hvd.DiLoCo(sync_every=1, lr=1.0, momentum=0.0), None):
            model = make_model()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                process_set=set_of(group),
                outer=outer,
            )
            train(optimizer, model, group.rank, 0, 6)
            optimizer.close()
            found.append(values_of(model))
        return found

    for apart, together in on("2 hosts of 2", rank):
        assert torch.allclose(apart, together, rtol=0, atol=1e-13)


def test_between_outer_steps_nothing_is_sent_and_one_sends_each_parameter_once():
    every, buckets = 50, 4

    def rank(group: Group) -> Any:
        model = make_model(torch.float32)
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=every))
        train(optimizer, model, group.rank, 0, 1)
        calls = group.engine.calls
        found = []
        for interval in range(2):
            del calls[:]
            train(optimizer, model, group.rank, 1 + every * interval, every * (interval + 1))
            before = len(calls)
            train(optimizer, model, group.rank, every * (interval + 1), every * (interval + 1) + 1)
            found.append((before, list(calls)))
        return found, sum(param.numel() for param in model.parameters())

    for found, numel in on("2 hosts", rank, make_wrapper=counting):
        # The last step of the first interval takes the outer step, and so do the ranks' counts of steps.
        assert found[0][0] == 1 + buckets
        sent = [call for call in found[0][1] if call[0] == "allreduce"]
        assert sum(elements for _, elements in sent) == numel
        assert [call for call in found[0][1] if call[0] != "allreduce"] == [("allgather", 16)]


def test_fragments_send_their_part_in_turns_and_int4_sends_an_eighth():
    outer = hvd.DiLoCo(sync_every=8, fragments=2, compression=hvd.Compression.int4)

    def rank(group: Group) -> Any:
        model = nn.Linear(64, 64, bias=True)
        nn.init.constant_(model.weight, 0.1)
        nn.init.constant_(model.bias, 0.1)
        optimizer = wrap(group, model, outer)
        calls, found = group.engine.calls, []
        for _ in range(16):
            del calls[:]
            model.zero_grad()
            model(torch.full((2, 64), float(group.rank))).square().mean().backward()
            optimizer.step()
            found.append([elements for kind, elements in calls if (kind, elements) != ("allgather", 16)])
        return found

    found = on("2 hosts", rank, make_wrapper=counting)[0]
    # The bias comes first; its 64 numbers fill a block of 256.
    turns = {4: [128 + 4], 8: [64 * 64 // 2 + 4 * 16], 12: [128 + 4], 16: [64 * 64 // 2 + 4 * 16]}
    for step in range(2, 17):
        assert found[step - 1] == turns.get(step, []), step


@pytest.mark.night(but=7)
@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("place", "name", "stop"),
    [
        *[("2 hosts", name, 7) for name in OUTERS],
        *[("2 hosts of 2", name, stop) for name in ("streaming", "int4") for stop in (4, 9)],
        *[("3 hosts of 2", name, 8) for name in ("int4", "SparseLoCo")],
    ],
)
def test_a_run_that_is_saved_and_resumed_has_the_bits_of_one_that_was_not(place, name, stop):
    def rank(group: Group) -> Any:
        model = make_model()
        optimizer = wrap(group, model, OUTERS[name], "AdamW")
        train(optimizer, model, group.rank, 0, stop)
        saved = pickle.dumps((model.state_dict(), optimizer.state_dict()))
        train(optimizer, model, group.rank, stop, 16)
        with optimizer.averaged():
            expected = values_of(model)
        expected = torch.cat([expected, values_of(model)])
        optimizer.close()
        of_model, of_optimizer = pickle.loads(saved)
        model = make_model()
        model.load_state_dict(of_model)
        optimizer = wrap(group, model, OUTERS[name], "AdamW")
        optimizer.load_state_dict(of_optimizer)
        train(optimizer, model, group.rank, stop, 16)
        with optimizer.averaged():
            found = values_of(model)
        assert torch.equal(torch.cat([found, values_of(model)]), expected)

    on(place, rank)


@pytest.mark.night(but=4)
@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["streaming", "int4", "SparseLoCo"])
@pytest.mark.parametrize("place", ["2 hosts of 2", "3 hosts of 2", "3 hosts"])
def test_one_consolidated_file_resumes_on_other_hosts(place, name):
    stop = 7

    def save(group: Group) -> Any:
        model = make_model()
        optimizer = wrap(group, model, OUTERS[name])
        train(optimizer, model, group.rank, 0, stop)
        optimizer.consolidate_state_dict(to=1)
        saved = optimizer.state_dict()
        train(optimizer, model, group.rank, stop, stop + 1)
        assert optimizer.state_dict()["hvdlite"]["outer"]["ranks"] is not None
        return saved

    found = on(place, save)
    saved = found[1]
    assert saved["hvdlite"]["outer"]["ranks"] is None
    assert found[0]["hvdlite"]["outer"]["ranks"] is not None

    def load(group: Group) -> Any:
        model = make_model()
        optimizer = wrap(group, model, OUTERS[name])
        optimizer.load_state_dict(copy.deepcopy(saved))
        again = optimizer.state_dict()["hvdlite"]["outer"]
        train(optimizer, model, group.rank, stop, stop + 6)
        with optimizer.averaged():
            return again, values_of(model)

    for other in (["a", "b"], ["a", "a", "b", "b"], ["a", "b", "c"]):
        loaded = on(other, load)
        assert all(torch.equal(values, loaded[0][1]) for _, values in loaded)
        assert all(again["steps"] == stop for again, _ in loaded)
        if len(set(other)) == len(other):
            whole = saved["hvdlite"]["outer"]["parameters"]
            for param, kinds in loaded[0][0]["parameters"].items():
                assert kinds.keys() == whole[param].keys()
                for kind, (start, values) in kinds.items():
                    assert start == 0
                    assert torch.equal(values, whole[param][kind][1])


def test_max_norm_clips_the_averages_of_each_host_with_the_bits_of_clipping_by_hand():
    def rank(group: Group) -> Any:
        found = []
        for max_norm in (0.4, None):
            model = make_model()
            optimizer = wrap(group, model, OUTERS["DiLoCo"], "AdamW", max_norm=max_norm)
            norms = []
            for step in range(9):
                optimizer.zero_grad()
                loss_of(model, group.rank, step).backward()
                if max_norm is not None:
                    optimizer.step()
                    norms.append(optimizer.grad_norm)
                    continue
                optimizer.synchronize()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.4))
                with optimizer.skip_synchronize():
                    optimizer.step()
            found.append((torch.stack(norms), values_of(model)))
            optimizer.close()
        (norms, values), (by_hand, values_by_hand) = found
        assert torch.equal(norms, by_hand)
        assert torch.equal(values, values_by_hand)
        return norms

    norms = on("2 hosts of 2", rank)
    assert (norms[0] > 0.4).any()
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[2], norms[3])
    assert not torch.equal(norms[0], norms[2])


def test_gradients_are_accumulated_within_a_step_and_steps_are_counted():
    def rank(group: Group) -> Any:
        model = make_model()
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=2), backward_passes_per_step=2)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, group.rank, 2 * step + part).backward()
            optimizer.step()
            found.append(values_of(model))
        return found

    first, second = on("2 hosts", rank)
    assert [torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True)] == [False, True, False, True]


@pytest.mark.parametrize("place", ["2 hosts", "2 hosts of 2"])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_that_grad_scaler_skips_on_one_host_counts_there_too(place, unscales):
    def rank(group: Group) -> Any:
        model = make_model(torch.float32)
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=3))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before, skipped = values_of(model), []
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, group.rank, step)
            if step == 1 and group.rank == 0:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            skipped.append(torch.equal(values_of(model), before))
            before = values_of(model)
        return skipped, before, scaler.get_scale()

    found = on(place, rank)
    hosts = PLACES[place]
    for host, (skipped, values, scale) in zip(hosts, found, strict=True):
        # The other ranks of the host of rank 0 have its gradients too.
        assert skipped == [False, host == hosts[0], False, False, False, False]
        assert scale == (2.0 if host == hosts[0] else 4.0)
        assert torch.equal(values, found[0][1])


@pytest.mark.parametrize("place", ["2 hosts", "3 hosts", "2 hosts of 2"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_top_k_keeps_stays_on_all_hosts_where_the_part_of_one_is_not_finite(place, bad):
    def kept_of(optimizer: hvd.DistributedOptimizer) -> dict[str, Tensor]:
        parameters = optimizer.state_dict()["hvdlite"]["outer"]["parameters"]
        return {name: kinds["residual of own"][1] for name, kinds in parameters.items() if "residual of own" in kinds}

    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, OUTERS["SparseLoCo"], bucket_cap_mb=None)
        train(optimizer, model, group.rank, 0, 5)
        before = kept_of(optimizer)
        assert any(values.any() for values in before.values())
        if group.hosts[group.rank] == "a":
            with torch.no_grad():
                # In the parts of both ranks of a host.
                for param in model.parameters():
                    param.view(-1)[[0, -1]] = bad
        optimizer.zero_grad()
        optimizer.step()
        assert_same(kept_of(optimizer), before)
        assert not values_of(model).isfinite().any()

    on(place, rank)


def test_grad_scaler_unscales_what_the_step_uses():
    def rank(group: Group) -> Any:
        found = []
        for scale in (1.0, 256.0):
            model = make_model()
            optimizer = wrap(group, model, hvd.LocalSGD(sync_every=3))
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, group.rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.close()
            found.append(values_of(model))
        assert torch.equal(*found)

    on("2 hosts of 2", rank)


def test_averaged_restores_the_parameters_after_an_exception_and_forbids_steps():
    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, STREAMING)
        train(optimizer, model, group.rank, 0, 7)
        own = values_of(model)

        def raise_in_averaged() -> None:
            with optimizer.averaged(), optimizer.averaged():
                assert not torch.equal(values_of(model), own)
                raise KeyError("of the user")

        with pytest.raises(KeyError, match="of the user"):
            raise_in_averaged()
        assert torch.equal(values_of(model), own)
        with (
            pytest.raises(hvd.GradientError, match=r"step\(\) was called in `with optimizer.averaged"),
            optimizer.averaged(),
        ):
            train(optimizer, model, group.rank, 7, 8)
        assert torch.equal(values_of(model), own)

    on("2 hosts of 2", rank)


@pytest.mark.parametrize("place", ["2 hosts", "2 hosts of 2"])
def test_averaged_shows_a_loaded_anchor_before_the_first_step(place):
    def rank(group: Group) -> Tensor:
        model = make_model()
        optimizer = wrap(group, model, STREAMING)
        train(optimizer, model, group.rank, 0, 7)
        with optimizer.averaged():
            anchor = values_of(model)
        own, state = values_of(model), copy.deepcopy(optimizer.state_dict())
        assert not torch.equal(own, anchor)
        optimizer.close()
        optimizer = wrap(group, model, STREAMING)
        optimizer.load_state_dict(state)
        with optimizer.averaged():
            assert torch.equal(values_of(model), anchor)
        assert torch.equal(values_of(model), own)
        train(optimizer, model, group.rank, 7, 8)
        return anchor

    first, *others = on(place, rank)
    assert all(torch.equal(other, first) for other in others)


def test_parameters_that_were_added_since_the_last_step_stay_as_they_are_in_averaged():
    def rank(group: Group) -> None:
        model, added = make_model(), nn.Parameter(torch.full((3,), float(group.rank)))
        optimizer = wrap(group, model, STREAMING)
        train(optimizer, model, group.rank, 0, 7)
        with optimizer.averaged():
            anchor = values_of(model)
        optimizer.add_param_group({"params": [added]})
        with optimizer.averaged():
            assert torch.equal(values_of(model), anchor)
            assert torch.equal(added, torch.full((3,), float(group.rank)))

    on("2 hosts of 2", rank)


def test_averaged_changes_nothing_before_the_first_step_and_without_outer_steps():
    def rank(group: Group) -> None:
        for outer in (None, hvd.LocalSGD(sync_every=2)):
            model = make_model()
            optimizer = wrap(group, model, outer)
            with optimizer.averaged():
                assert torch.equal(values_of(model), values_of(make_model()))
            assert "hvdlite" not in optimizer.state_dict()
            optimizer.close()

    on("2 hosts", rank)


def test_on_one_host_ranks_train_as_without_it_and_one_line_says_so(caplog):
    caplog.set_level("INFO", logger="hvdlite")

    def rank(group: Group) -> Any:
        found = []
        for outer in (None, hvd.DiLoCo(sync_every=2)):
            model = make_model()
            optimizer = wrap(group, model, outer)
            train(optimizer, model, group.rank, 0, 5)
            with optimizer.averaged():
                found.append(values_of(model))
            optimizer.close()
        assert torch.equal(*found)

    on(["a", "a", "a"], rank)
    lines = [record.getMessage() for record in caplog.records if "outer=" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("outer=DiLoCo(sync_every=2")
    assert "no effect" in lines[0]


def test_frozen_parameters_are_not_sent_and_unfreezing_one_is_an_error_on_every_rank():
    def rank(group: Group) -> None:
        model = make_model()
        model[0].requires_grad_(False)
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=2))
        train(optimizer, model, group.rank, 0, 2)
        assert list(optimizer.state_dict()["hvdlite"]["outer"]["parameters"]) == ["2.bias", "2.weight"]
        model[0].requires_grad_(True)
        with pytest.raises(hvd.GradientError, match=r"'0.weight' was frozen .* make a new DistributedOptimizer"):
            train(optimizer, model, group.rank, 2, 4)

    on("2 hosts", rank)


def test_parameters_that_are_added_later_take_part():
    def rank(group: Group) -> Any:
        model = make_model()
        optimizer = wrap(group, model[0], hvd.LocalSGD(sync_every=2))
        train(optimizer, model, group.rank, 0, 3)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        train(optimizer, model, group.rank, 3, 5)
        apart = values_of(model)
        state = optimizer.state_dict()["hvdlite"]["outer"]
        train(optimizer, model, group.rank, 5, 6)
        return len(state["parameters"]), apart, values_of(model)

    (count, apart, together), (_, other_apart, other) = on("2 hosts", rank)
    assert count == 4
    assert not torch.equal(apart, other_apart)
    assert torch.equal(together, other)


def test_parameters_of_several_dtypes_and_sparse_gradients_are_averaged():
    def rank(group: Group) -> Any:
        # Ranks are threads, which share PyTorch's random generator.
        embedding = nn.Embedding.from_pretrained(torch.linspace(-1.0, 1.0, 15).view(5, 3), freeze=False, sparse=True)
        turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        named = [("embedding", embedding.weight), ("turn", turn)]
        inner = torch.optim.SGD([param for _, param in named], lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, named, process_set=set_of(group), outer=hvd.LocalSGD(sync_every=2))
        for _ in range(2):
            optimizer.zero_grad()
            (embedding(torch.tensor([group.rank, 3])) * turn * (1 + group.rank)).abs().sum().backward()
            optimizer.step()
        return embedding.weight.detach().clone(), turn.detach().clone()

    first, *others = on("2 hosts of 2", rank)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def test_a_new_world_begins_an_interval_from_the_parameters_of_rank_0():
    def rank(generations: Iterator[int]) -> list[tuple[Tensor, Tensor]]:
        model, optimizer, found, state = make_model(), None, [], {}
        for _ in generations:
            if optimizer is None:
                inner = INNERS["SGD"](model.parameters())
                optimizer = hvd.DistributedOptimizer(
                    inner, model.named_parameters(), outer=hvd.DiLoCo(sync_every=3, delay=1), **SMALL
                )
            if state:
                # As when an elastic program goes back to its commit.
                optimizer.load_state_dict(state)
            of_rank_0 = hvd.broadcast(values_of(model), root_rank=0)
            train(optimizer, model, hvd.rank(), 0, 3)
            state = optimizer.state_dict()
            with optimizer.averaged():
                first = values_of(model)
            assert torch.equal(first, of_rank_0)
            train(optimizer, model, hvd.rank(), 3, 5)
            with optimizer.averaged():
                found.append((first, values_of(model)))
        return found

    first, second, third = run_generations([2, 3, 2], rank)
    for mine, theirs in [*zip(first, second, strict=True), (first[1], third[0])]:
        assert all(torch.equal(own, other) for own, other in zip(mine, theirs, strict=True))
    assert not any(torch.equal(before, after) for before, after in first)


# -- refused


@pytest.mark.parametrize("first", [0, 1])
def test_join_is_refused_on_every_rank_also_after_another_has_left(first):
    has_left = threading.Event()

    def rank(number: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            INNERS["SGD"](model.parameters()), model.named_parameters(), outer=hvd.LocalSGD(sync_every=2)
        )
        train(optimizer, model, number, 0, 1)
        if number != first:
            assert has_left.wait(60)
        try:
            hvd.join()
        finally:
            current_world().controller.close()
            has_left.set()

    for error in attempt_worlds(2, rank):
        assert isinstance(error, hvd.GradientError)
        assert "hvd.join() does not work with outer=LocalSGD(sync_every=2)" in str(error)


def test_join_is_not_refused_for_an_optimizer_that_is_gone_on_one_rank():
    kept: list[Any] = []
    is_gone = threading.Event()

    def rank(number: int) -> int:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            INNERS["SGD"](model.parameters()), model.named_parameters(), outer=hvd.LocalSGD(sync_every=2)
        )
        train(optimizer, model, number, 0, 1)
        if number == 0:
            kept.append(optimizer)
            # A join before that would keep the other rank's optimizer.
            is_gone.wait()
        else:
            # Until it is gone: what finalizers leave, the next collection takes.
            reducer = ref(optimizer._reducer)
            del optimizer, model
            while reducer() is not None:
                gc.collect()
            is_gone.set()
        return hvd.join()

    assert len(set(run_worlds(2, rank))) == 1


def test_one_that_is_gone_before_its_first_step_is_not_kept_for_the_opening_of_its_engine():
    def rank(group: Group) -> bool:
        model = make_model()
        optimizer = wrap(group, model, OUTERS["LocalSGD"])
        reducer = ref(optimizer._reducer)
        del optimizer
        # What finalizers leave, the next collection takes; and while another rank collects, this does nothing.
        for _ in range(100):
            gc.collect()
            if reducer() is None:
                break
            time.sleep(0.01)
        return reducer() is None

    assert on("2 hosts", rank) == [True, True]


def test_steps_that_survive_a_lost_rank_are_refused():
    settings = Settings(hvd.Compression.none, hvd.Average, 1.0, 1, False, outer=hvd.LocalSGD(sync_every=2))
    with pytest.raises(ValueError, match=r"--survive, .* does not work with outer=LocalSGD\(sync_every=2\)"):
        check_survivable(settings, has_all_ranks=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hvd.LocalSGD(sync_every=0), "LocalSGD: sync_every=0 is not a whole number of at least 1"),
        (lambda: hvd.LocalSGD(sync_every=1.5), "LocalSGD: sync_every=1.5"),
        (lambda: hvd.DiLoCo(sync_every=0), "DiLoCo: sync_every=0 is not a whole number of at least 1"),
        (lambda: hvd.DiLoCo(sync_every=4, fragments=5), "fragments=5 is above sync_every=4"),
        (lambda: hvd.DiLoCo(sync_every=4, fragments=0), "fragments=0 is not a whole number of at least 1"),
        (lambda: hvd.DiLoCo(sync_every=4, delay=4), "delay=4 is not below sync_every=4"),
        (lambda: hvd.DiLoCo(sync_every=4, delay=-1), "delay=-1 is not a whole number of at least 0"),
        (lambda: hvd.DiLoCo(sync_every=4, mix=1.1), "mix=1.1 is not from 0 to 1"),
        (lambda: hvd.DiLoCo(sync_every=4, lr=0), "lr=0 is not a positive number"),
        (lambda: hvd.DiLoCo(sync_every=4, momentum=1.0), "momentum=1.0 is not from 0 to below 1"),
        (lambda: hvd.DiLoCo(sync_every=4, compression=hvd.Compressor), "is no format of outer gradients"),
        (lambda: hvd.DiLoCo(sync_every=4, compression=hvd.Compression.powersgd()), "is no format of outer gradients"),
    ],
)
def test_numbers_outside_their_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": hvd.Adasum}, "does not work with op=hvd.Adasum"),
        ({"step_on_arrival": True}, "does not work with step_on_arrival=True"),
        ({"exchange": hvd.Exchange}, "does not work with exchange="),
        ({"compression": hvd.Compression.int8}, "does not work with compression=Compression.int8"),
        ({"autotune": True, "bucket_cap_mb": None}, "autotune=True: .* outer=LocalSGD"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(options, words):
    def rank(group: Group) -> None:
        with pytest.raises(ValueError, match=words):
            wrap(group, make_model(), hvd.LocalSGD(sync_every=2), **options)

    on("2 hosts", rank)


def test_anything_else_is_no_outer():
    def rank(group: Group) -> None:
        with pytest.raises(TypeError, match=r"outer=8 is neither an hvd\.LocalSGD nor an hvd\.DiLoCo"):
            wrap(group, make_model(), 8)

    on("2 hosts", rank)


def test_more_fragments_than_buckets_are_an_error_on_every_rank_in_the_first_step():
    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, hvd.DiLoCo(sync_every=8, fragments=5))
        train(optimizer, model, group.rank, 0, 1)

    for error in errors_on(["a", "b"], rank):
        assert isinstance(error, ValueError)
        assert "more fragments than buckets of parameters, 4" in str(error)


def test_different_arguments_on_two_ranks_are_an_error_on_both():
    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=2 + group.rank))
        train(optimizer, model, group.rank, 0, 1)

    for error in errors_on(["a", "b"], rank):
        assert isinstance(error, hvd.MismatchError)
        assert "LocalSGD(sync_every=2)" in str(error)
        assert "LocalSGD(sync_every=3)" in str(error)


def test_hosts_that_begin_with_different_parameters_are_an_error_on_every_rank():
    def rank(group: Group) -> None:
        model = make_model()
        if group.rank >= 2:
            model[2].weight.data += 1.0
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=2))
        train(optimizer, model, group.rank, 0, 1)

    for error in errors_on(["a", "a", "b", "b"], rank):
        assert isinstance(error, hvd.MismatchError)
        assert "parameter '2.weight' differs between rank" in str(error)
        assert "call hvd.broadcast_parameters" in str(error)


def test_checkpoints_of_different_steps_are_an_error_that_names_the_ranks():
    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=4))
        states = []
        for step in range(3):
            train(optimizer, model, group.rank, step, step + 1)
            states.append(optimizer.state_dict())
        optimizer.close()
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=4))
        if group.rank != 2:
            optimizer.load_state_dict(states[0 if group.rank == 1 else 2])
        train(optimizer, model, group.rank, 3, 4)

    for error in errors_on(["a", "b", "c"], rank):
        assert isinstance(error, hvd.MismatchError)
        assert "rank 0 (a): step 3; rank 1 (b): step 1; rank 2 (c): no loaded state" in str(error)


def test_a_checkpoint_of_another_step_that_is_loaded_midway_is_an_error_at_the_next_outer_step():
    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, hvd.DiLoCo(sync_every=4, delay=2))
        train(optimizer, model, group.rank, 0, 1)
        state = optimizer.state_dict()
        train(optimizer, model, group.rank, 1, 2)
        if group.rank == 0:
            optimizer.load_state_dict(state)
        train(optimizer, model, group.rank, 2, 9)

    for error in errors_on(["a", "b"], rank):
        assert isinstance(error, hvd.MismatchError)
        assert "rank 0 (a): step 4, after 5 calls of step(); rank 1 (b): step 4, after 4 calls of step()" in str(error)


@pytest.mark.parametrize(
    ("other", "options", "words"),
    [
        (hvd.LocalSGD(sync_every=5), {}, r"outer=LocalSGD\(sync_every=4\), .* has outer=LocalSGD\(sync_every=5\)"),
        (hvd.LocalSGD(sync_every=4), {"rest": True}, "of another model: it differs in parameter '2.bias"),
        (None, {}, "the optimizer has no outer="),
    ],
)
def test_a_state_of_other_arguments_or_another_model_is_refused(other, options, words):
    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, hvd.LocalSGD(sync_every=4))
        train(optimizer, model, group.rank, 0, 1)
        state = optimizer.state_dict()
        optimizer.close()
        if options:
            model = nn.Sequential(model[0])
        optimizer = wrap(group, model, other)
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(state)

    on("2 hosts", rank)


def test_a_state_of_another_number_of_ranks_on_each_host_is_refused():
    def state_of(place: str) -> Any:
        def rank(group: Group) -> Any:
            model = make_model()
            optimizer = wrap(group, model, hvd.LocalSGD(sync_every=4))
            train(optimizer, model, group.rank, 0, 1)
            return optimizer.state_dict()

        return on(place, rank)[0]

    state = state_of("2 hosts of 2")

    def rank(group: Group) -> None:
        optimizer = wrap(group, make_model(), hvd.LocalSGD(sync_every=4))
        with pytest.raises(ValueError, match="is of 2 hosts with 2 ranks each, and there are 2 with 1"):
            optimizer.load_state_dict(state)

    on("2 hosts", rank)


def resaved(group: Group, outer: Any, steps: int, is_whole: bool) -> tuple[nn.Module, Any, Tensor]:
    """A model after some steps with a bucket for each parameter, the optimizer's state, and the anchor."""
    model = make_model()
    optimizer = wrap(group, model, outer)
    train(optimizer, model, group.rank, 0, steps)
    with optimizer.averaged():
        anchor = values_of(model)
    if is_whole:
        states = []
        for to in range(group.size):
            optimizer.consolidate_state_dict(to)
            if to == group.rank:
                states.append(copy.deepcopy(optimizer.state_dict()))
        (state,) = states
    else:
        state = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    return model, state, anchor


@pytest.mark.parametrize(("place", "is_whole"), [("2 hosts", False), ("2 hosts of 2", True)])
def test_a_state_of_whole_parameters_may_be_loaded_into_other_buckets(place, is_whole):
    def rank(group: Group) -> None:
        model, state, anchor = resaved(group, OUTERS["DiLoCo"], 6, is_whole)
        optimizer = wrap(group, model, OUTERS["DiLoCo"], bucket_cap_mb=1)
        optimizer.load_state_dict(state)
        with optimizer.averaged():
            assert torch.equal(values_of(model), anchor)
        train(optimizer, model, group.rank, 6, 9)

    on(place, rank)


def test_a_state_of_one_ranks_shards_is_refused_in_other_buckets():
    def rank(group: Group) -> None:
        model, state, _ = resaved(group, OUTERS["DiLoCo"], 6, is_whole=False)
        optimizer = wrap(group, model, OUTERS["DiLoCo"], bucket_cap_mb=1)
        with pytest.raises(ValueError, match=r"other buckets: use the same bucket_cap_mb .* call consolidate_state"):
            optimizer.load_state_dict(state)

    on("2 hosts of 2", rank)


def test_a_fragment_that_was_on_its_way_is_refused_in_other_buckets():
    outer = hvd.DiLoCo(sync_every=4, fragments=2, delay=1)

    def rank(group: Group) -> None:
        model, state, _ = resaved(group, outer, 6, is_whole=True)
        assert len(state["hvdlite"]["outer"]["in_flight"]) == 1
        params = dict(model.named_parameters())
        pairs = [[params["0.weight"], params["0.bias"]], [params["2.weight"], params["2.bias"]]]
        optimizer = wrap(group, model, outer, groups=pairs, bucket_cap_mb=1)
        with pytest.raises(ValueError, match=r"of other buckets: use the same bucket_cap_mb and groups, or delete"):
            optimizer.load_state_dict(state)

    on("2 hosts of 2", rank)


@pytest.mark.parametrize("name", ["DiLoCo", "int4", "SparseLoCo"])
def test_ranks_without_a_part_of_any_parameter_consolidate_with_the_others_after_a_load(name):
    def rank(group: Group) -> Any:
        outer, model = OUTERS[name], nn.Linear(1, 1, bias=False).double()
        if outer.fragments > 1:
            outer = replace(outer, fragments=1)
        nn.init.ones_(model.weight)
        optimizer = wrap(group, model, outer)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.full((1, 1), group.rank + 1.0, dtype=torch.float64)).sum().backward()
            optimizer.step()

        for _ in range(6):
            step()
        state = copy.deepcopy(optimizer.state_dict())
        found = []
        for is_loaded in (False, True):
            if is_loaded:
                optimizer.close()
                optimizer = wrap(group, model, outer)
                optimizer.load_state_dict(state)
            optimizer.consolidate_state_dict()
            found.append(optimizer.state_dict())
        if group.rank == 0:
            assert_same(*found)
            assert "velocity" in found[0]["hvdlite"]["outer"]["parameters"]["weight"] or not outer.momentum

    on("2 hosts of 2", rank)


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_load_has_the_program_wait_for_a_stream_that_still_averages(is_empty, monkeypatch):
    waited: list[object] = []

    def wait(self: object) -> None:
        waited.append(self)

    monkeypatch.setattr(StreamWork, "wait", wait)
    monkeypatch.setattr(StreamWork, "is_completed", lambda self: True)

    def rank(group: Group) -> None:
        model = make_model()
        optimizer = wrap(group, model, STREAMING)
        train(optimizer, model, group.rank, 0, 2)
        state = optimizer.state_dict()
        (launch,) = optimizer._reducer.step._in_flight
        stream = object.__new__(StreamWork)
        launch.works.append(stream)
        if is_empty:
            del state["hvdlite"]
        optimizer.load_state_dict(state)
        assert any(each is stream for each in waited)

    on("2 hosts", rank)
