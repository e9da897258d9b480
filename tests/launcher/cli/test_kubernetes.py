"""The manifests in examples/kubernetes: their commands are valid, and find the hosts of the operator."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
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


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.yaml")} - {"jobset.yaml"}))
def test_a_manifests_command_runs_an_example_with_known_flags(name, tmp_path):
    script = tmp_path / "discover_hosts.sh"
    script.write_text("#!/bin/sh\necho digits-worker-0.digits.default.svc\n")
    script.chmod(0o755)
    words = [word.replace("/etc/mpi/discover_hosts.sh", str(script)) for word in command_of(name)]
    flags, command = Parser().split_command(words)
    Parser().parse_args(flags)
    assert command[0] == "python"
    assert (EXAMPLES.parent / command[1]).is_file()


@pytest.mark.slow
def test_the_pods_of_a_jobset_train_together_by_their_numbers(tmp_path):
    manifest = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (workers,) = manifest["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value", "a secret of all pods") for each in container["env"]}
    # The name of the first pod, as JobSet makes it.
    assert env["MASTER_ADDR"] == f"{manifest['metadata']['name']}-{workers['name']}-0-0.{manifest['metadata']['name']}"
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(env["WORLD_SIZE"])
    with socket.socket() as kept:
        # Bound until all have ended, so that no other process gets the port; rank 0 can still listen there.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.getsockname()[1]), "OMP_NUM_THREADS": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        pods = []
        for number in range(int(env["WORLD_SIZE"])):
            own = {**os.environ, **env, "JOB_COMPLETION_INDEX": str(number)}
            words = [*container["command"][:-1], f"{container['command'][-1]} --epochs 1"]
            pods.append(
                subprocess.Popen(
                    words, env=own, cwd=EXAMPLES.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        outs = [pod.communicate(timeout=200)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0] * len(pods), outs
    assert "after 1 epoch on 4 ranks" in outs[0]


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
