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
    assert (int(hvd.Average), int(hvd.Sum)) == (0, 1)
