"""Ray's workers as ranks, by `RayExecutor` and in Ray Train, with a Ray of one node that the programs start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.conftest import Launch

# Ray is there only where tests of all packages run: with a slow test it is asked for.
pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("ray_programs.py"))


@pytest.fixture(autouse=True, scope="module")
def _needs_ray() -> None:
    # Here, and not for the module: where only other tests are asked for, this is no skipped one.
    pytest.importorskip("ray.train")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program has found, which is run once."""
    tmp = tmp_path_factory.mktemp("ray")
    # Ray keeps the token of its cluster in the home directory.
    env = {"HOME": str(tmp), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    env["RAY_prestart_worker_first_driver"] = "0"  # else as many as there are CPUs, which are not all used
    job = Launch(tmp, (str(tmp / "results"),), env, None, cwd=tmp, program=(PROGRAM,))
    try:
        code, out, err = job.ended(800)
    finally:
        job.kill_all()
    assert code == 0, (out + err).decode()
    results: dict[str, Any] = torch.load(tmp / "results.0", weights_only=True)
    return results


def assert_trained(ranks: list[dict[str, Any]], alone: list[torch.Tensor]) -> None:
    for number, rank in enumerate(ranks):
        assert (rank["rank"], rank["size"], rank["local"]) == (number, 2, (number, 2))
        for mine, other in zip(rank["weights"], alone, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_the_executors_ranks_train_the_weights_of_one_process(found):
    for ranks in (found["executor"]["ranks"], found["executor"]["later"]):
        assert_trained(ranks, found["alone"])
    for number, rank in enumerate(found["executor"]["ranks"]):
        assert rank["word"] == "given"
        variables = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number), "HOROVOD_SIZE": "2"}
        assert rank["variables"] == variables | {"WORD": "set"}


def test_the_executor_calls_functions_with_the_object_that_each_rank_has_made(found):
    executor = found["executor"]
    assert (executor["counts"], executor["of rank 0"], executor["after"]) == ([12, 12], 14, [14, 12])


def test_the_executor_raises_the_error_that_is_the_cause_and_says_what_is_missing(found):
    executor = found["executor"]
    assert "ZeroDivisionError" in executor["failure"]
    assert "repr=rank 1" in executor["failure"]
    assert "ActorDiedError" in executor["death"]
    assert "start() was called before" in executor["twice"]
    assert "call start() first" in executor["not started"]
    assert "has not found 2 times {'CPU': 1} on different nodes within" in executor["too large"]


@pytest.mark.night
def test_a_program_written_for_horovods_executor_runs_unchanged(found):
    assert_trained(found["horovod"], found["alone"])


def test_ray_trains_workers_are_ranks_with_hvdlites_backend_and_with_rays_own(found):
    for kind, ranks in found["train"].items():
        assert_trained(ranks, found["alone"])
        for number, rank in enumerate(ranks):
            # Ray's own backend has made the process group, which hvd.init() takes over.
            assert (rank["initialized"], rank["world_rank"]) == (kind == "torch", number)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "either num_workers or num_hosts"),
        ({"num_workers": 1, "num_hosts": 1}, "either num_workers or num_hosts"),
        ({"num_workers": 0}, "num_workers=0.* from 1 on"),
        ({"num_workers": "2"}, "num_workers='2'.* from 1 on"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "gpus_per_worker=1.*needs use_gpu=True"),
        ({"num_workers": 2, "min_workers": 1}, "min_workers.*number of ranks is fixed"),
    ],
)
def test_arguments_that_have_no_meaning_are_refused(arguments, said):
    from hvdlite.ray import RayExecutor  # noqa: PLC0415  # it needs Ray

    with pytest.raises(ValueError, match=said):
        RayExecutor(RayExecutor.create_settings(), **arguments)
    for name in ("ssh_identity_file", "ssh_str", "nics"):
        with pytest.raises(ValueError, match=f"create_settings.*{name}.*leave them out"):
            RayExecutor.create_settings(**{name: "x"})


def test_places_put_the_ranks_of_a_node_beside_each_other_and_show_each_its_own_gpu_by_local_rank():
    from hvdlite.ray.places import WorkerFacts, in_order_of_ranks, places_of  # noqa: PLC0415  # it needs Ray

    facts = [
        WorkerFacts(node, f"host-{node}", f"10.0.0.{node}", (gpu,))
        for node, gpu in (("1", "3"), ("2", "0"), ("1", "1"), ("2", "2"), ("1", "0"))
    ]
    order = in_order_of_ranks(facts)
    assert order == [0, 2, 4, 1, 3]
    places = places_of([facts[number] for number in order], "job")
    assert [place.placement.local_rank for place in places] == [0, 1, 2, 0, 1]
    assert [place.variables["HOROVOD_CROSS_RANK"] for place in places] == ["0", "0", "0", "1", "1"]
    assert [place.variables["NODE_RANK"] for place in places] == ["0", "0", "0", "1", "1"]
    assert [place.variables["CUDA_VISIBLE_DEVICES"] for place in places] == [*["3,1,0"] * 3, *["0,2"] * 2]
    assert [place.address for place in places] == [*["10.0.0.1"] * 3, *["10.0.0.2"] * 2]
    (alone,) = places_of(facts[:1], "job")
    assert alone.address is None


def test_the_store_answers_as_torchs_own_stores_do():
    import asyncio  # noqa: PLC0415

    from hvdlite_wire.store_requests import StoreRequest as R  # noqa: PLC0415

    from hvdlite.ray.places import StoreActor  # noqa: PLC0415  # it needs Ray

    async def answers() -> list[Any]:
        store = StoreActor()

        async def ask(operation: R, *parts: bytes, timeout_s: float | None = 0.05) -> Any:
            return await store.request(int(operation), list(parts), timeout_s)

        waiting = asyncio.ensure_future(ask(R.GET, b"a", b"b", timeout_s=None))
        found = [await ask(R.GET, b"a"), await ask(R.CHECK, b"a"), await ask(R.SET, b"a", b"1", b"b", b"2")]
        found += [await waiting, await ask(R.WAIT, b"a"), await ask(R.CHECK, b"a", b"b"), await ask(R.COUNT)]
        found += [await ask(R.ADD, b"n", b"2"), await ask(R.ADD, b"n", b"-5"), await ask(R.APPEND, b"a", b"23")]
        found += [await ask(R.COMPARE_SET, b"a", b"x", b"y"), await ask(R.COMPARE_SET, b"a", b"123", b"y")]
        found += [await ask(R.COMPARE_SET, b"new", b"x", b"y"), await ask(R.COMPARE_SET, b"new", b"", b"y")]
        return [*found, await ask(R.DELETE, b"a"), await ask(R.DELETE, b"a")]

    assert asyncio.run(answers()) == [
        *[None, [b"0"], []], *[[b"1", b"2"], [], [b"1"], [b"2"]], *[[b"2"], [b"-3"], []],
        *[[b"123"], [b"y"], [b"x"], [b"y"], [b"1"], [b"0"]],
    ]  # fmt: skip


def test_without_ray_the_import_says_how_to_install_it(monkeypatch):
    import sys  # noqa: PLC0415

    from hvdlite.ray.places import import_ray  # noqa: PLC0415

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="pip install 'ray'"):
        import_ray("ray")
    monkeypatch.setitem(sys.modules, "ray.train.backend", None)
    with pytest.raises(ImportError, match="pip install 'ray\\[train\\]'"):
        import_ray("ray.train.backend", "[train]")


def test_ranks_with_several_gpus_see_the_first_one_of_each_by_local_rank():
    from hvdlite.ray.places import WorkerFacts, places_of  # noqa: PLC0415  # it needs Ray

    facts = [WorkerFacts("node", "host", "10.0.0.1", gpus) for gpus in (("0", "1"), ("2", "3"))]
    assert [place.variables["CUDA_VISIBLE_DEVICES"] for place in places_of(facts, "job")] == ["0,2,1,3"] * 2
