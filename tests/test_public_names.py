"""What is public is complete, sorted, documented, and has the signature that Horovod's users know."""

from __future__ import annotations

import inspect

import hvdlite as hvd


def test_all_is_sorted_and_every_name_is_there():
    assert hvd.__all__ == sorted(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_every_public_function_and_class_has_a_docstring_of_its_own():
    for name in hvd.__all__:
        value = getattr(hvd, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert value.__doc__, name


def test_the_optimizers_arguments_are_horovods_in_horovods_order():
    names = list(inspect.signature(hvd.DistributedOptimizer).parameters)
    assert names[:10] == [
        "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
        "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set",
    ]  # fmt: skip


def test_the_numbers_of_the_operations_are_horovods():
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert [int(op) for op in ops] == [0, 1, 2, 3, 4, 5]


def test_the_arguments_of_the_collectives_are_horovods_in_horovods_order():
    reduced = ["average", "name", "op", "prescale_factor", "postscale_factor", "process_set"]
    scattered = ["name", "op", "process_set", "prescale_factor", "postscale_factor"]
    expected = {
        "allreduce": ["tensor", *reduced[:2], "compression", *reduced[2:]],
        "grouped_allreduce": ["tensors", *reduced[:2], "compression", *reduced[2:]],
        **{name: ["tensor", *reduced] for name in ("allreduce_", "allreduce_async", "allreduce_async_")},
        **{f"grouped_{name}": ["tensors", *reduced] for name in ("allreduce_", "allreduce_async", "allreduce_async_")},
        "reducescatter": ["tensor", "name", "compression", *scattered[1:]],
        "grouped_reducescatter": ["tensors", "name", "compression", *scattered[1:]],
        "reducescatter_async": ["tensor", *scattered],
        "grouped_reducescatter_async": ["tensors", *scattered],
        **{name: ["tensor", "name", "process_set"] for name in ("allgather", "allgather_async")},
        **{f"grouped_{name}": ["tensors", "name", "process_set"] for name in ("allgather", "allgather_async")},
        **{
            f"broadcast{form}": ["tensor", "root_rank", "name", "process_set"]
            for form in ("", "_", "_async", "_async_")
        },
        **{name: ["tensor", "splits", "name", "process_set"] for name in ("alltoall", "alltoall_async")},
        "sparse_allreduce_async": ["tensor", "name", "op", "process_set"],
        "barrier": ["process_set"],
        "poll": ["handle"],
        "synchronize": ["handle"],
    }
    for name, arguments in expected.items():
        assert list(inspect.signature(getattr(hvd, name)).parameters) == arguments, name
