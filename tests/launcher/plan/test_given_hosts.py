"""The hosts that Kubernetes' operators, dstack, SkyPilot and SageMaker name in the environment."""

from __future__ import annotations

import pytest
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.plan.hosts import AUTO, Host, given_hosts

SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "4"}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("OMPI_MCA_orte_default_hostfile", "job-worker-0.job.ns.svc slots=2\njob-worker-1.job.ns.svc slots=2\n"),
        ("I_MPI_HYDRA_HOST_FILE", "job-worker-0.job.ns.svc:2\njob-worker-1.job.ns.svc:2\n"),
        ("HYDRA_HOST_FILE", "job-worker-0.job.ns.svc:2\njob-worker-1.job.ns.svc:2\n"),
        ("DSTACK_MPI_HOSTFILE", "job-worker-0.job.ns.svc slots=2\njob-worker-1.job.ns.svc slots=2"),
    ],
)
def test_a_hostfile_that_an_operator_has_written_names_the_hosts(tmp_path, variable, text):
    (tmp_path / "hostfile").write_text(text)
    hosts = (Host("job-worker-0.job.ns.svc", 2), Host("job-worker-1.job.ns.svc", 2))
    assert given_hosts({variable: f"{tmp_path}/hostfile"}) == (variable, hosts)


def test_a_hostfile_that_is_missing_is_named_with_its_variable(tmp_path):
    with pytest.raises(UsageError, match=rf"^HYDRA_HOST_FILE: .*{tmp_path}/none"):
        given_hosts({"HYDRA_HOST_FILE": f"{tmp_path}/none"})


def test_skypilots_nodes_have_their_gpus_as_slots():
    assert given_hosts(SKYPILOT) == ("SKYPILOT_NODE_IPS", (Host("10.0.0.1", 8), Host("10.0.0.2", 8)))
    without = {**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_NODE_IPS": "fd00::1"}
    assert given_hosts(without) == ("SKYPILOT_NODE_IPS", (Host("fd00::1", AUTO),))


def test_sagemakers_hosts_have_their_gpus_as_slots():
    assert given_hosts(SAGEMAKER) == ("SM_HOSTS", (Host("algo-1", 4), Host("algo-2", 4)))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "1"}, "SKYPILOT_NODE_RANK is 1, and SkyPilot starts this command on every"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-2"}, "SM_CURRENT_HOST is algo-2, .* start hvdlite-run on algo-1"),
        ({"SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1' is not a list of hosts in JSON"),
        ({"SM_HOSTS": "[]"}, "is not a list of hosts in JSON"),
        ({"SKYPILOT_NODE_IPS": "-oProxyCommand=x"}, "SKYPILOT_NODE_IPS: .* ssh would read a name"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_variable(environ, words):
    with pytest.raises(UsageError, match=words):
        given_hosts(environ)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID"])
def test_within_another_launchers_job_nothing_is_taken(tmp_path, variable):
    (tmp_path / "hostfile").write_text("a\n")
    assert given_hosts({"OMPI_MCA_orte_default_hostfile": f"{tmp_path}/hostfile", variable: "0"}) is None
    assert given_hosts({}) is None
