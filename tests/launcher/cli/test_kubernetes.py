"""The manifests in examples/kubernetes: their commands are valid, and find the hosts of the operator."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hvdlite_launcher.cli.flag_parser import Parser
from hvdlite_launcher.cli.hvdlite_run import main

EXAMPLES = Path(__file__).parents[3] / "examples/kubernetes"


def command_of(name: str) -> list[str]:
    program, *words = command_of_train_job(name) if name == "trainjob.yaml" else command_of_mpi_job(name)
    assert program == "hvdlite-run"
    return words


def command_of_mpi_job(name: str) -> list[str]:
    manifest = yaml.safe_load((EXAMPLES / name).read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    pods = manifest["spec"]["mpiReplicaSpecs"]
    (launcher,), (worker,) = (pods[kind]["template"]["spec"]["containers"] for kind in ("Launcher", "Worker"))
    assert launcher["image"] == worker["image"]
    return launcher["command"]


def command_of_train_job(name: str) -> list[str]:
    """The names of the runtime's jobs and of their containers are those by which Trainer v2 finds them."""
    runtime, job = yaml.safe_load_all((EXAMPLES / name).read_text())
    assert (runtime["apiVersion"], runtime["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert (job["spec"]["runtimeRef"]["kind"], job["spec"]["runtimeRef"]["name"]) == ("TrainingRuntime", "hvdlite")
    assert runtime["metadata"]["name"] == "hvdlite"
    assert runtime["spec"]["mlPolicy"]["mpi"]["mpiImplementation"] == "OpenMPI"
    jobs = {each["name"]: each["template"] for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    (launcher,), (node,) = (jobs[each]["spec"]["template"]["spec"]["containers"] for each in ("launcher", "node"))
    assert launcher["name"] == node["name"] == "node"
    assert launcher["image"] == node["image"]
    return job["spec"]["trainer"]["command"]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_a_manifests_command_runs_an_example_with_known_flags(name, tmp_path):
    script = tmp_path / "discover_hosts.sh"
    script.write_text("#!/bin/sh\necho digits-worker-0.digits.default.svc\n")
    script.chmod(0o755)
    words = [word.replace("/etc/mpi/discover_hosts.sh", str(script)) for word in command_of(name)]
    flags, command = Parser().split_command(words)
    Parser().parse_args(flags)
    assert command[0] == "python"
    assert (EXAMPLES.parent / command[1]).is_file()


@pytest.mark.parametrize(
    ("manifest", "hosts"),
    [
        ("mpijob.yaml", ["digits-worker-0.digits.default.svc", "digits-worker-1.digits.default.svc"]),
        ("trainjob.yaml", ["digits-node-0-0.digits", "digits-node-0-1.digits"]),
    ],
)
def test_a_job_gets_a_worker_in_each_slot_of_the_operators_hostfile(monkeypatch, tmp_path, capsys, manifest, hosts):
    (tmp_path / "hostfile").write_text("".join(f"{host} slots=2\n" for host in hosts))
    monkeypatch.setenv("OMPI_MCA_orte_default_hostfile", str(tmp_path / "hostfile"))
    assert main(["--dry-run", *command_of(manifest)]) == 0
    out, err = capsys.readouterr()
    assert err == f"hvdlite-run: hosts by OMPI_MCA_orte_default_hostfile: {', '.join(hosts)}\n"
    assert out.count(hosts[0]) >= 2
    assert "rank 3" in out


def test_a_flag_that_names_hosts_has_priority(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OMPI_MCA_orte_default_hostfile", str(tmp_path / "none"))
    assert main(["--dry-run", "-H", "localhost:1", "true"]) == 0
    assert capsys.readouterr().err == ""
