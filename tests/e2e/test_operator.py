"""Jobs as Kubeflow's mpi-operator starts them: the test writes its files, and lets pods come late and vanish.

The launcher's pod is the desk. Pods have sshd on port 2222, new host keys, and names that are known once they run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from e2e.conftest import Launch, assert_clean, wait_until
from e2e.ssh_hosts import Lan
from e2e.test_elastic_jobs import WORKER, generations, reads, says

pytestmark = pytest.mark.slow

PODS = ("digits-worker-0.digits.default.svc", "digits-worker-1.digits.default.svc")
EXAMPLES = Path(__file__).parents[2] / "examples/kubernetes"


def flags_of(manifest: str, script: Path | None = None) -> list[str]:
    """Returns the flags of the launcher's command in one of the examples, which end at its program."""
    pods = yaml.safe_load((EXAMPLES / manifest).read_text())["spec"]["mpiReplicaSpecs"]
    (container,) = pods["Launcher"]["template"]["spec"]["containers"]
    _, *words = container["command"]
    flags = words[: words.index("python")]
    return [flag.replace("/etc/mpi/discover_hosts.sh", str(script)) for flag in flags]


def make_pods(make_lan) -> Lan:
    return make_lan(*PODS, ports=[2222, 2222])


def without(text: str, name: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if name not in line.split())


def test_a_job_begins_once_the_pods_of_the_operators_hostfile_have_names_and_listen(make_lan, launch, tmp_path):
    lan = make_pods(make_lan)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{pod} slots=2\n" for pod in PODS))
    names = lan.desk.hosts_file.read_text()
    lan.desk.hosts_file.write_text(without(names, PODS[0]))
    lan.hosts[1].stop_sshd()
    job = launch(
        *flags_of("mpijob.yaml"), "sh", "-c", "echo $HVDLITE_RANK on $(hostname)", on=lan.desk,
        env={"OMPI_MCA_orte_default_hostfile": str(hostfile)},
    )  # fmt: skip
    told = b""
    while not all(f"waiting for {pod}".encode() in told for pod in PODS):
        assert job.process.stderr is not None
        told += (line := job.process.stderr.readline())
        assert line, told
    lan.desk.hosts_file.write_text(names)
    lan.hosts[1].start_sshd()
    code, out, err = job.ended()
    told += err
    assert code == 0, told
    places = [line.partition(b">:")[2].decode() for line in out.splitlines()]
    assert sorted(places) == [f"{rank} on {PODS[rank // 2]}" for rank in range(4)]
    assert told.count(b"waiting for ") == 2, told
    assert_clean(lan)


def write_script(path: Path, *pods: str) -> None:
    """Writes the operator's script, which names the pods that run, without slots."""
    new = path.with_suffix(".new")
    new.write_text("#!/bin/sh\n" + "".join(f"echo {pod}\n" for pod in pods))
    new.chmod(0o755)
    os.rename(new, path)


@pytest.mark.night
def test_a_job_goes_on_while_pods_vanish_and_come_again_under_the_same_name(make_lan, launch, tmp_path):
    lan = make_pods(make_lan)
    script = tmp_path / "discover_hosts.sh"
    write_script(script, *PODS)
    flags = flags_of("elastic-mpijob.yaml", script)
    flags[flags.index("5") : flags.index("60") + 1] = ["1", "2"]  # a lost pod's name may come back so soon
    job: Launch = launch(*flags, "-np", "2", "python", "-c", WORKER, str(tmp_path), on=lan.desk)
    read = reads(job)
    read(b"generation 1: 0 1 at 0")
    lan.hosts[1].vanish()
    write_script(script, PODS[0])
    says(job, f"lost {PODS[1]}")
    read(b"generation 2: 0 at 0")
    wait_until(lambda: not lan.hosts[1].processes())
    (tmp_path / "enough.2").touch()
    lan.hosts[1].change_host_key()
    write_script(script, *PODS)
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert sorted(generations(out)) == [3], out.decode()
