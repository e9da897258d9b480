"""`hvdlite.spark`: ranks as tasks of Spark, here with a stand-in for pyspark; tests/integrations has the real one."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import stand_in_spark
from stand_in_spark import SparkContext

from hvdlite.horovod.finder import MODULES, refusal
from hvdlite.spark import HorovodRunner, RankError, _Facts, _variables_of, run


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> SparkContext:
    context = SparkContext()
    stand_in_spark.install(monkeypatch, context)
    return context


def train(scale: float, fails: str = "") -> tuple[Any, ...]:
    """Sums over the ranks; ``fails`` says how rank 1 does."""
    import torch  # noqa: PLC0415

    import hvdlite as hvd  # noqa: PLC0415  # in the rank's process alone

    if fails == "before init" and os.environ["RANK"] == "1":
        raise ZeroDivisionError("before init")
    hvd.init()
    if fails == "raises" and hvd.rank() == 1:
        raise ZeroDivisionError("of rank 1")
    if fails == "dies" and hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total = hvd.allreduce(torch.tensor(scale * (1 + hvd.rank())), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), total.item(), os.environ.get("WORD")


@pytest.mark.slow
@pytest.mark.usefixtures("context")
def test_a_function_is_called_in_ranks_and_its_values_come_back_by_rank():
    assert run(train, (2.0,), env={"WORD": "given"}) == [(0, 2, 0, 6.0, "given"), (1, 2, 1, 6.0, "given")]
    assert HorovodRunner(np=2).run(train, scale=1.0) == (0, 2, 0, 3.0, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("raises", "rank 1:\n.*ZeroDivisionError: of rank 1"),
        ("before init", "rank 1:\n.*ZeroDivisionError: before init"),
        ("dies", "rank 1:\nits process was killed by SIGKILL before the function returned"),
    ],
)
@pytest.mark.usefixtures("context")
def test_the_error_is_that_of_the_rank_that_failed_first(fails, said):
    with pytest.raises(RankError, match=f"(?s){said}"):
        run(train, (1.0,), {"fails": fails}, num_proc=2)


def test_too_few_slots_end_the_wait_and_say_how_many_there_are(context):
    with pytest.raises(TimeoutError, match=r"has not started 3 tasks at once within 0.1 s .* it has 2 slots"):
        run(train, (1.0,), num_proc=3, start_timeout=0.1)
    assert context.cancelled.is_set()


def test_tasks_that_spark_would_try_again_end_the_job(context):
    context.attempt = 1
    with pytest.raises(RankError, match=r"Spark has lost a task.*nothing is tried again"):
        run(train, (1.0,), num_proc=3)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_proc": 0}, "num_proc=0.* is not a whole number from 1 on"),
        ({"num_proc": "two"}, "num_proc='two'.* is not a whole number"),
        ({"use_mpi": True}, "use_mpi=True.*MPI is not used"),
        ({"stdout": "file"}, "stdout='file'.*ranks print where Spark's workers do"),
        ({"start_timeout": -1}, "start_timeout"),
    ],
)
def test_arguments_that_have_no_meaning_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        run(train, (1.0,), **arguments)


@pytest.mark.parametrize("name", ["HVDLITE_SPARK_START_TIMEOUT", "HOROVOD_SPARK_START_TIMEOUT"])
def test_a_variable_that_is_no_number_is_named_and_one_that_is_counts(context, monkeypatch, name):
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ValueError, match=f"{name}='soon' is not a positive number of seconds"):
        run(train, (1.0,), num_proc=3)
    monkeypatch.setenv(name, "0.1")
    with pytest.raises(TimeoutError, match=r"within 0.1 s"):
        run(train, (1.0,), num_proc=3)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize(("nics", "names"), [("eth0", "eth0"), (["eth0", "eth1"], "eth0,eth1")])
def test_network_interfaces_are_those_of_gloo_and_nccl(monkeypatch, nics, names):
    monkeypatch.setattr("hvdlite.spark._Job.run", lambda self, task: task.variables)
    assert run(train, nics=nics) == {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": names}


def test_without_a_session_or_with_nonsense_for_ranks_the_error_says_so(monkeypatch):
    stand_in_spark.install(monkeypatch, None)
    with pytest.raises(RuntimeError, match="Could not find an active SparkContext"):
        run(train)
    with pytest.raises(ValueError, match=r"np='x'.*not a whole number"):
        HorovodRunner(np="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="driver_log_verbosity='some'"):
        HorovodRunner(np=1, driver_log_verbosity="some")


def test_ranks_of_a_host_follow_each_other_and_see_its_gpus_with_their_own_at_their_local_rank():
    facts = [_Facts(host, gpus, 4711, "secret") for host, gpus in (("b", ["1"]), ("a", ["0"]), ("b", ["0"]), ("b", []))]
    places = [_variables_of(index, facts, "10.0.0.1") for index in range(4)]
    assert [place["RANK"] for place in places] == ["0", "3", "1", "2"]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "0", "1", "2"]
    assert [place["LOCAL_WORLD_SIZE"] for place in places] == ["3", "1", "3", "3"]
    assert [place["GROUP_RANK"] for place in places] == ["0", "1", "0", "0"]
    assert [(place["HOROVOD_CROSS_RANK"], place["HOROVOD_CROSS_SIZE"]) for place in places] == [
        *(("0", "2"), ("1", "2"), ("0", "1"), ("0", "1"))
    ]
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in places] == ["1,0", "0", "1,0", None]


def test_horovods_and_databricks_names_are_found(monkeypatch):
    assert MODULES["spark"] == {"hvdlite.spark": "run"}
    from sparkdl import HorovodRunner as Found  # noqa: PLC0415  # type: ignore[import-not-found]

    assert Found is HorovodRunner
    assert "neither estimators" in str(refusal("horovod.spark.torch"))
    assert "neither estimators" in str(refusal("horovod.spark.run_elastic"))
