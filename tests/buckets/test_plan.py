"""Properties of the bucket plan that hold for any sizes and any cap."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.buckets.plan import BucketPlan, ParamSpec, first_difference, plan_buckets

DTYPES = [torch.float16, torch.float32, torch.float64, torch.complex64]


@st.composite
def spec_lists(draw):
    drawn = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 9), max_size=3),
                st.sampled_from(DTYPES),
                st.sampled_from(["cpu", "meta"]),
                st.booleans(),
            ),
            max_size=12,
        )
    )
    return [
        ParamSpec.of(f"p{i}", torch.empty(shape, dtype=dtype, device=device).requires_grad_(trainable))
        for i, (shape, dtype, device, trainable) in enumerate(drawn)
    ]


caps = st.integers(1, 4000)


@given(spec_lists(), caps)
def test_every_parameter_has_exactly_one_slice_of_its_size(specs, cap_bytes):
    pieces = [piece for plan in plan_buckets(specs, cap_bytes=cap_bytes) for piece in plan.slices]
    assert sorted(piece.spec.name for piece in pieces) == sorted(spec.name for spec in specs)
    assert all(piece.stop - piece.start == piece.spec.numel for piece in pieces)


@given(spec_lists(), caps)
def test_slices_do_not_overlap_and_lie_before_the_flags(specs, cap_bytes):
    for plan in plan_buckets(specs, cap_bytes=cap_bytes):
        end = 0
        for piece in plan.slices:
            assert piece.start >= end
            assert piece.start * plan.dtype.itemsize % 64 == 0
            end = piece.stop
        assert end <= plan.grad_numel
        assert plan.numel == plan.grad_numel + 3 * len(plan.slices) + 4


@given(spec_lists(), caps)
def test_only_a_lone_parameter_may_exceed_the_cap(specs, cap_bytes):
    for plan in plan_buckets(specs, cap_bytes=cap_bytes):
        assert len(plan.slices) == 1 or plan.grad_numel * plan.dtype.itemsize <= cap_bytes


@given(spec_lists(), st.integers(1, 12).map(lambda lines: 64 * lines))
def test_a_bucket_that_is_closed_had_no_room_for_the_next_parameter(specs, cap_bytes):
    last: dict[object, int] = {}
    for plan in plan_buckets(specs, cap_bytes=cap_bytes):
        kind = (plan.dtype, plan.device, plan.is_frozen)
        first = BucketPlan(plan.slices[:1], plan.dtype, plan.device)
        assert kind not in last or last[kind] + first.grad_numel * plan.dtype.itemsize > cap_bytes
        last[kind] = plan.grad_numel * plan.dtype.itemsize


@given(spec_lists())
def test_a_cap_of_0_is_a_bucket_for_each_parameter(specs):
    assert all(len(plan.slices) == 1 for plan in plan_buckets(specs, cap_bytes=0))


@given(spec_lists(), caps)
def test_buckets_do_not_mix_dtypes_devices_or_frozen_with_trained(specs, cap_bytes):
    for plan in plan_buckets(specs, cap_bytes=cap_bytes):
        assert {(piece.spec.dtype, piece.spec.device) for piece in plan.slices} == {(plan.dtype, plan.device)}
        assert len({piece.spec.trainable for piece in plan.slices}) == 1


@given(spec_lists(), caps)
def test_within_a_kind_the_last_parameter_comes_first(specs, cap_bytes):
    order = {spec.name: i for i, spec in enumerate(specs)}
    placed: dict[object, list[int]] = {}
    for plan in plan_buckets(specs, cap_bytes=cap_bytes):
        for piece in plan.slices:
            kind = (plan.dtype, plan.device, piece.spec.trainable)
            placed.setdefault(kind, []).append(order[piece.spec.name])
    for numbers in placed.values():
        assert numbers == sorted(numbers, reverse=True)


@given(spec_lists(), caps)
def test_buckets_of_frozen_parameters_come_last(specs, cap_bytes):
    plans = plan_buckets(specs, cap_bytes=cap_bytes)
    assert sorted(plans, key=lambda plan: plan.is_frozen) == list(plans)


@given(spec_lists(), caps, st.data())
def test_a_plan_without_some_parameters_keeps_the_others_in_order(specs, cap_bytes, data):
    names = {spec.name for spec in specs if data.draw(st.booleans())}
    for plan in plan_buckets(specs, cap_bytes=cap_bytes):
        kept = [piece.spec.name for piece in plan.without(names).slices]
        assert kept == [piece.spec.name for piece in plan.slices if piece.spec.name not in names]


@given(spec_lists(), caps, st.data())
def test_the_members_of_a_group_share_a_bucket_however_small_the_cap(specs, cap_bytes, data):
    group = [spec.name for spec in specs if data.draw(st.booleans())]
    plans = plan_buckets(specs, cap_bytes=cap_bytes, groups=[group])
    for plan in plans:
        names = {piece.spec.name for piece in plan.slices}
        assert names <= set(group) or not names & set(group)
    kinds = {(s.dtype, s.device, s.trainable) for s in specs if s.name in group}
    assert sum(bool({p.spec.name for p in plan.slices} & set(group)) for plan in plans) == len(kinds)


@given(spec_lists(), caps)
def test_the_plan_depends_on_the_specs_alone(specs, cap_bytes):
    assert plan_buckets(specs, cap_bytes=cap_bytes) == plan_buckets(list(specs), cap_bytes=cap_bytes)


def test_a_dense_layout_keeps_its_strides_and_any_other_becomes_contiguous():
    channels_last = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert ParamSpec.of("a", channels_last).stride == channels_last.stride()
    assert ParamSpec.of("b", torch.empty(1, 4).expand(3, 4)).stride == (4, 1)
    assert ParamSpec.of("c", torch.empty(4, 6)[:, ::2]).stride == (3, 1)


@given(spec_lists(), st.data())
def test_the_first_difference_is_none_only_for_equal_models(specs, data):
    mine = [(spec.name, spec.describe()) for spec in specs]
    assert first_difference(mine, list(mine)) is None
    if mine:
        index = data.draw(st.integers(0, len(mine) - 1))
        shorter = mine[:index] + mine[index + 1 :]
        assert first_difference(mine, shorter)[0] == mine[index][0]
        assert first_difference(shorter, mine)[0] == mine[index][0]
        changed = [*mine[:index], (mine[index][0], "something else"), *mine[index + 1 :]]
        assert first_difference(mine, changed) == (*mine[index], "something else")
