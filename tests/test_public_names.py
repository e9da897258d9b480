"""The public names are complete, sorted and documented, and have the signatures that Horovod's users know."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from hvdlite_launcher.version import VERSION

import hvdlite as hvd
import hvdlite.torch


def test_all_is_sorted_and_every_name_is_there():
    assert hvd.__all__ == sorted(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_no_function_or_class_has_the_name_of_a_module():
    """Whoever imports `hvdlite.name` first, and threads that do so meanwhile, would find the module in its place."""
    modules = {path.stem for path in Path(hvd.__file__).parent.iterdir() if path.stem in hvd.__all__}
    assert {name for name in modules if not inspect.ismodule(getattr(hvd, name))} == set()


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


def loaded(program: str) -> set[str]:
    """Returns the modules that a program's own lines load beyond those of `import torch`, without hvdlite's prefix."""
    program = (
        "import sys, torch, torch.distributed; before = set(sys.modules)\n"
        f"{program}\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, timeout=200, stdout=subprocess.PIPE, text=True)
    return set(run.stdout.split())


@pytest.mark.slow
def test_the_import_loads_no_module_that_torch_has_not_loaded_but_the_package_itself():
    assert loaded("import hvdlite") == {"hvdlite"}
    own = {"hvdlite", "hvdlite.errors", "hvdlite.outside_graphs", "hvdlite.torch"}
    assert loaded("import hvdlite.torch") == own


@pytest.mark.slow
def test_who_only_reads_the_rank_loads_neither_optimizers_nor_operations():
    modules = loaded("import hvdlite as hvd; hvd.init(); hvd.rank()")
    assert "hvdlite.runtime.world" in modules
    assert not {name.split(".")[1] for name in modules if name.startswith("hvdlite.")} & {"ops", "optim", "compression"}
    others = {"statistics", "hvdlite.rendezvous.rank0_stores"}
    others |= {"hvdlite.coordinator.coordinator", "psutil"}  # rank 0's of several
    assert not others & modules


def test_the_names_are_in_stubs_for_type_checkers_each_once_with_its_own_name():
    names = []
    for path in Path(hvd.__file__).parent.glob("*.pyi"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                names += [alias.name for alias in node.names]
                assert all(alias.name in ("*", alias.asname) for alias in node.names), "else it is not public there"
    assert sorted(names) == ["*", *hvd.__all__]


def test_horovods_names_are_hvdlites_but_for_four():
    assert set(hvdlite.torch.__all__) - set(hvd.__all__) == {"HorovodInternalError", "check_extension"}
    for name in set(hvdlite.torch.__all__) & set(hvd.__all__):
        is_same = getattr(hvdlite.torch, name) is getattr(hvd, name)
        assert is_same == (name not in ("Compression", "init")), name


def test_a_name_that_is_none_of_the_packages_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="module 'hvdlite' has no attribute 'allreduced'"):
        _ = hvd.allreduced


def test_the_version_is_the_launchers_too():
    assert hvd.__version__ == VERSION
    assert "__version__" in dir(hvd)


def test_what_is_public_can_be_listed_before_it_is_used():
    assert set(hvd.__all__) <= set(dir(hvd))
