"""`hvd.init()` under launchers of others: torchrun, OpenMPI's and MPICH's mpirun, Slurm's srun; the real programs.

What needs addresses or ports of its own runs in namespaces: network, mounts and processes that end with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from copied_ranks import RankServer
from e2e.conftest import PATIENCE_S, wait_until
from long_run import chosen

pytestmark = pytest.mark.slow

TRAIN = """
import os, sys
import torch
import hvdlite as hvd

hvd.init(timeout_s=60)
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
rows = torch.arange(24.0).reshape(6, 4) / 24
for step in range(10):
    optimizer.zero_grad()
    model(rows[hvd.rank() :: hvd.size()]).square().mean().backward()
    optimizer.step()
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
assert hvd.allgather_object(bits) == [bits] * hvd.size()
place = (hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
places = hvd.allgather_object(place)
if hvd.rank() == 0:
    print(places, [round(w, 4) for p in model.parameters() for w in p.flatten().tolist()])
"""
AGAIN = """
for _ in range(3):
    hvd.shutdown()
    hvd.init(timeout_s=60)
    assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == hvd.size()
"""
ONE_HOST = "[(0, 0, 3, 0, 1), (1, 1, 3, 0, 1), (2, 2, 3, 0, 1)]"
ALONE = "[(0, 0, 1, 0, 1)]"

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
OPENMPI = ["mpirun.openmpi", "--oversubscribe", "-np", "3"]
MPICH = ["mpirun.mpich", "-np", "3"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
COMPLAINTS = ("finalize", "BAD TERMINATION", "exited", "terminated")


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture
def run(rank_server: RankServer) -> Callable[..., tuple[int, str, str]]:
    """Provides `ended` for processes that import torch."""
    return partial(ended, [sys.executable, *rank_server.python()])


def ended(python: list[str], command: list[str], tmp_path: Path, body: str = "", **env: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr of ``command python program``; without a body, of the command alone."""
    need(command[0])
    if body:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(body))
        if command == TORCHRUN:
            command = [*python, *command[1:], "--no-python"]
        command = [*command, *python, str(path)]
    process = subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        out, err = process.communicate(timeout=250)
    except subprocess.TimeoutExpired:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
        pytest.fail(f"{command} hangs: {process.communicate()}")
    return process.returncode, out, err


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> str:
    """Returns the weights that one process trains on all rows."""
    path = tmp_path_factory.mktemp("alone") / "program.py"
    path.write_text(TRAIN)
    words = [sys.executable, *rank_server.python(), str(path)]
    out = subprocess.run(words, check=True, capture_output=True, text=True, timeout=250).stdout
    assert out.startswith(ALONE)
    return out.removeprefix(ALONE)


@pytest.mark.night(but=2)
@pytest.mark.parametrize(
    ("command", "body"),
    [(TORCHRUN, TRAIN), (OPENMPI, TRAIN + AGAIN), (MPICH, TRAIN + AGAIN)],
    ids=["torchrun", "openmpi, and enter the world again", "mpich, and enter the world again"],
)
def test_three_ranks_of_a_launcher_train_as_one_process_does(run, command, body, weights, tmp_path):
    code, out, err = run(command, tmp_path, body)
    assert (code, out) == (0, ONE_HOST + weights), err
    assert not any(word in err for word in COMPLAINTS), err


@pytest.mark.night
def test_torchrun_in_the_environment_of_sparks_torchdistributor_has_its_own_ranks(run, weights, tmp_path):
    # TorchDistributor sets these in each barrier task, of which it counts the numbers, and starts torchrun there.
    of_task = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PYSPARK_TORCH_DISTRIBUTOR_RDZV_ID": "run"}
    of_task |= {"RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    code, out, err = run(TORCHRUN, tmp_path, TRAIN, **of_task)
    assert (code, out) == (0, ONE_HOST + weights), err


@pytest.mark.night
@pytest.mark.parametrize(
    "command", chosen([TORCHRUN, OPENMPI, MPICH], few=[OPENMPI]), ids=lambda command: Path(command[0]).name
)
def test_a_launcher_within_a_worker_of_hvdlite_run_is_the_one_that_counts(run, command, weights, tmp_path):
    need(command[0])
    (tmp_path / "program.py").write_text(TRAIN)
    python = [] if command == TORCHRUN else [sys.executable]
    around = [sys.executable, "-m", "hvdlite_launcher", "-np", "1", *command, *python, str(tmp_path / "program.py")]
    code, out, err = run(around, tmp_path)
    assert (code, out) == (0, "[0]<stdout>:" + ONE_HOST + weights), err


@pytest.mark.night
@pytest.mark.parametrize("command", chosen([OPENMPI, MPICH], few=[MPICH]), ids=lambda command: Path(command[0]).name)
def test_hvdlite_run_within_an_mpi_job_is_the_one_that_counts(run, command, weights, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    one = [*command[:-1], "1"]
    inner = [sys.executable, "-m", "hvdlite_launcher", "-np", "3", sys.executable, str(tmp_path / "train.py")]
    code, out, err = run([*one, *inner], tmp_path, NO_COLOR="1")  # OpenMPI gives rank 0 a terminal
    assert (code, out) == (0, "[0]<stdout>:" + ONE_HOST + weights), err


@pytest.mark.night(but=1)
@pytest.mark.parametrize("command", [OPENMPI, MPICH], ids=["openmpi", "mpich"])
def test_a_rank_that_has_ended_well_does_not_end_those_that_go_on(run, command, tmp_path):
    body = """
    import os, sys, time
    import psutil
    import hvdlite as hvd

    def lives(pid):
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    hvd.init(timeout_s=60)
    everyone = hvd.allgather_object(os.getpid())
    if hvd.rank() == 0:
        sys.exit()
    while lives(everyone[0]):
        time.sleep(0.01)
    time.sleep(0.3)  # for the launcher to see it too
    os.write(1, b"went on\\n")  # whole, whoever else writes
    """
    code, out, err = run(command, tmp_path, body)
    assert (code, out) == (0, "went on\n" * 2), err


@pytest.mark.night
def test_mpich_ends_with_the_exit_code_of_the_rank_that_failed(run, tmp_path):
    code, _, err = run(MPICH, tmp_path, TRAIN + "if hvd.rank() == 1: sys.exit(7)\nhvd.barrier()\n")
    assert code == 7, err


@pytest.mark.night
def test_mpi_itself_can_be_used_after_init(run, tmp_path):
    body = """
    import ctypes, sys
    import hvdlite as hvd
    hvd.init(timeout_s=60)
    mpi = ctypes.CDLL("libmpich.so.12")
    assert mpi.MPI_Init(None, None) == 0
    size = ctypes.c_int()
    assert mpi.MPI_Comm_size(0x44000000, ctypes.byref(size)) == 0  # MPICH's MPI_COMM_WORLD
    assert size.value == hvd.size() == 3
    assert mpi.MPI_Finalize() == 0
    hvd.barrier()
    """
    code, _, err = run(MPICH, tmp_path, body)
    assert code == 0, err


@pytest.mark.night
def test_one_rank_of_mpirun_needs_nobody(run, tmp_path):
    code, out, err = run(["mpirun.mpich", "-np", "1"], tmp_path, TRAIN)
    assert code == 0, err
    assert out.startswith(ALONE)


# --- several hosts: in a network of their own ---

INSIDE = """
set -e
ip link set lo up
ip link add inner type veth peer name outer
ip addr add 10.99.0.1/24 dev inner
ip addr add 10.99.0.2/24 dev inner
ip link set inner up
ip link set outer up
printf '127.0.0.1 localhost\\n10.99.0.1 n1 %s\\n10.99.0.2 n2\\n' "$(hostname)" > hosts
mount --bind hosts /etc/hosts
touch ready
exec cat  # until the test's end of the pipe is closed, even if by its own death; all that runs inside ends then
"""
# Accepts mpirun's options for a remote shell and runs on this machine; gives each "host" a name of its own.
REMOTE_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' "$host" "$*"
"""
TWO_HOSTS = {  # OpenMPI fills one host first, MPICH alternates
    "openmpi": "[(0, 0, 2, 0, 2), (1, 1, 2, 0, 1), (2, 0, 1, 1, 2)]",
    "mpich": "[(0, 0, 2, 0, 2), (1, 0, 1, 1, 2), (2, 1, 2, 0, 1)]",
}


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Path]]:
    """Returns a command prefix that runs a command in new namespaces, and a directory for daemons there."""
    need("unshare", "nsenter", "ip")
    if os.getuid() != 0:
        pytest.skip("only root makes namespaces")
    directory = tmp_path_factory.mktemp("inside")
    (directory / "ssh").write_text(REMOTE_SHELL)
    (directory / "ssh").chmod(0o755)
    unshare = subprocess.Popen(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", INSIDE],
        cwd=directory,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: (directory / "ready").exists() or unshare.poll() is not None)
    if unshare.poll() is not None:
        pytest.skip(f"no namespaces here: {unshare.communicate()[1]}")
    (first,) = psutil.Process(unshare.pid).children()
    yield ["nsenter", "--target", str(first.pid), "--net", "--mount", "--pid"], directory
    unshare.communicate(timeout=100)
    assert not first.is_running()


@pytest.mark.night(but=1)
@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_over_two_hosts_ranks_meet_through_the_launchers_own_exchange(run, name, inside, weights, tmp_path):
    need(f"mpirun.{name}")
    enter, directory = inside
    hosts = {
        "openmpi": ["-mca", "plm_rsh_agent", str(directory / "ssh"), "--host", "10.99.0.11:2,10.99.0.12:1"],
        "mpich": ["-launcher", "ssh", "-launcher-exec", str(directory / "ssh"), "-hosts", "10.99.0.11,10.99.0.12"],
    }
    checks = "import os\nassert os.environ['GLOO_SOCKET_IFNAME'] == 'inner'\n"
    code, out, err = run([*enter, f"mpirun.{name}", *hosts[name], "-np", "3"], tmp_path, TRAIN + checks + AGAIN)
    assert (code, out) == (0, TWO_HOSTS[name] + weights), err
    assert not any(word in err for word in COMPLAINTS), err


@pytest.mark.night
@pytest.mark.parametrize("name", chosen(["openmpi", "mpich"], few=["mpich"]))
def test_an_address_of_the_users_own_is_where_the_ranks_meet(run, name, inside, weights, tmp_path):
    need(f"mpirun.{name}")
    command = {"openmpi": OPENMPI, "mpich": MPICH}[name]
    # The port is free, because no other program is in this network.
    address = {"MASTER_ADDR": "10.99.0.2", "MASTER_PORT": "4711"}
    check = "assert ':1267 ' in open('/proc/net/tcp').read() + open('/proc/net/tcp6').read()\nhvd.barrier()\n"
    code, out, err = run([*inside[0], *command], tmp_path, TRAIN + check, **address)
    assert (code, out) == (0, ONE_HOST + weights), err


# --- Slurm: one controller, two nodes ---

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(10.99.0.1)
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=10.99.0.1 Port=6901 CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=10.99.0.2 Port=6902 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(inside: tuple[list[str], Path]) -> tuple[list[str], dict[str, str]]:
    """Provides a command prefix for Slurm's commands, and the environment that they need."""
    need("munged", "slurmctld", "slurmd", "srun")
    enter, directory = inside
    directory.chmod(0o755)
    (directory / "state").mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    configuration = directory / "slurm.conf"
    configuration.write_text(SLURM_CONF.format(directory=directory, host=os.uname().nodename))
    environment = {"SLURM_CONF": str(configuration)}

    def start(*command: str) -> None:
        with (directory / f"{command[0]}.out").open("ab") as log:
            subprocess.Popen(
                [*enter, *command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def idle_nodes() -> str:
        command = [*enter, "sinfo", "--noheader", "--format=%D %T"]
        told = subprocess.run(
            command, check=False, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE_S
        )
        return told.stdout

    socket = directory / "munge.sock"
    files = [f"--{name}={directory}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
    start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *files)
    wait_until(socket.exists, message=lambda: "munged")
    start("slurmctld", "-D")
    for node in ("n1", "n2"):
        (directory / f"spool.{node}").mkdir()
        start("slurmd", "-D", "-N", node)
    wait_until(lambda: idle_nodes().strip() == "2 idle", message=lambda: f"both nodes are not idle; see {directory}")
    return enter, environment


@pytest.mark.night
def test_srun_on_one_node_trains_as_one_process_does(run, slurm, weights, tmp_path):
    enter, environment = slurm
    code, out, err = run([*enter, "srun", "-N", "1", "-n", "3"], tmp_path, TRAIN + AGAIN, **environment)
    assert (code, out) == (0, ONE_HOST + weights), err


@pytest.mark.night(but=1)
@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_srun_on_two_nodes_trains_as_one_process_does(run, mpi, slurm, weights, tmp_path):
    enter, environment = slurm
    command = [*enter, "srun", f"--mpi={mpi}", "-N", "2", "-n", "3", "--distribution=block"]
    code, out, err = run(command, tmp_path, TRAIN + AGAIN, **environment)
    assert (code, out) == (0, "[(0, 0, 2, 0, 2), (1, 1, 2, 0, 1), (2, 0, 1, 1, 2)]" + weights), err


@pytest.mark.night
def test_a_program_in_the_shell_of_a_slurm_job_is_one_rank(run, slurm, tmp_path):
    enter, environment = slurm
    code, out, err = run([*enter, "salloc", "-n", "3"], tmp_path, TRAIN, **environment)
    assert code == 0, err
    assert out.startswith(ALONE)
    batch = [*enter, "sbatch", "--wait", "-n", "3", "--output", str(tmp_path / "out"), "--wrap"]
    code, _, err = run([*batch, f"{sys.executable} {tmp_path}/program.py"], tmp_path, **environment)
    assert code == 0, err
    assert (tmp_path / "out").read_text().startswith(ALONE)


@pytest.mark.night
def test_slurm_hands_on_the_exit_code_of_a_failed_task(run, slurm, tmp_path):
    enter, environment = slurm
    body = TRAIN + "if hvd.rank() == 1: sys.exit(7)\nhvd.barrier()\n"
    code, _, err = run([*enter, "srun", "-n", "3"], tmp_path, body, **environment)
    assert code == 7, err


CHECKPOINTED = """
import os, time
from pathlib import Path
import torch
import hvdlite as hvd

hvd.init(timeout_s=60)
checkpoint, run = Path("checkpoint"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
first = int(checkpoint.read_text()) if checkpoint.exists() else 0
saver = hvd.save_on_signal(lambda: hvd.rank() or checkpoint.write_text(str(step)), requeue=True)
for step in range(first, first + 5) if run else range(1, 10**6):
    hvd.allreduce(torch.ones(1), name="x")
    Path(f"run.{run}.rank.{hvd.rank()}").touch()
    time.sleep(0.01)
    saver.step()
if hvd.rank() == 0:
    Path("new").write_text(f"run {run} of {hvd.size()} ranks from {first}")
    Path("new").rename("done")
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("limit", chosen(["signal", "time"], few=["signal"]))
@pytest.mark.parametrize("script", ["srun", "hvdlite-run"])
def test_a_job_saves_on_all_ranks_before_its_time_limit_and_goes_on_in_the_queue(run, script, limit, slurm, tmp_path):
    """Slurm counts limits in minutes, so the short form sends what it sends before the limit by `scancel`."""
    enter, environment = slurm
    example = (Path(__file__).parents[2] / f"examples/slurm/{script}.sbatch").read_text()
    for theirs, ours in (
        ("#SBATCH --gpus-per-node=4\n", ""),  # there are none
        ("--mpi=pmix", "--mpi=pmi2"),  # which Debian's Slurm has, too
        ("--time=04:00:00", "--time=00:03:00"),
        ("@90", "@30"),  # Slurm sends it up to a minute earlier
        ("s/$/:4/", "s/$/:1/"),
        ("--ntasks-per-node=4", "--ntasks-per-node=1"),
    ):
        example = example.replace(theirs, ours)
    (tmp_path / "job.sbatch").write_text(example)
    (tmp_path / "train.py").write_text(CHECKPOINTED)
    environment = {**environment, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def told(*command: str) -> str:
        code, out, err = run([*enter, *command], tmp_path, **environment)
        assert code == 0, err
        return out

    output = tmp_path / "output"
    options = ["--parsable", f"--chdir={tmp_path}", f"--output={output}", "--open-mode=append"]
    job = told("sbatch", *options, str(tmp_path / "job.sbatch")).strip()
    wait_until(lambda: len(list(tmp_path.glob("run.0.rank.*"))) == 2, message=output.read_text)
    if limit == "signal":
        told("scancel", *(["--batch"] if script == "hvdlite-run" else []), "--signal=USR1", job)
    wait_until((tmp_path / "checkpoint").exists, message=output.read_text)
    wait_until(lambda: "JobState=PENDING" in told("scontrol", "show", "job", job), message=output.read_text)
    told("scontrol", "update", f"JobId={job}", "StartTime=now")  # instead of two minutes after it was queued again
    wait_until((tmp_path / "done").exists, message=output.read_text)
    saved = (tmp_path / "checkpoint").read_text()
    assert (tmp_path / "done").read_text() == f"run 1 of 2 ranks from {saved}"
    assert int(saved) > 0
    wait_until(
        lambda: "JobState=COMPLETED" in told("scontrol", "show", "job", job),
        message=lambda: told("scontrol", "show", "job", job) + output.read_text(),
    )
    assert "Restarts=1 " in told("scontrol", "show", "job", job)


# --- a secret of the user's own ---

GREET = """
import os, sys
if "SECRET_OF_RANK_1" in os.environ and os.environ["RANK"] == "1":
    os.environ["HVDLITE_SECRET"] = os.environ["SECRET_OF_RANK_1"]
import hvdlite as hvd
hvd.init(timeout_s=60)
os.write(1, f"{sorted(hvd.allgather_object(hvd.rank()))}\\n".encode())  # whole, whoever else writes
"""

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.mark.night
def test_ranks_of_torchrun_meet_with_a_secret_of_the_users_own(run, tmp_path):
    code, out, err = run(TORCHRUN, tmp_path, GREET, HVDLITE_SECRET=SECRET)
    assert (code, out) == (0, "[0, 1, 2]\n" * 3), err


@pytest.mark.night
def test_a_rank_with_another_secret_is_an_error_everywhere_before_anything_is_connected(run, tmp_path):
    code, _, err = run(TORCHRUN, tmp_path, GREET, HVDLITE_SECRET=SECRET, SECRET_OF_RANK_1=SECRET[::-1])
    assert code != 0
    assert "HVDLITE_SECRET to the same value for every rank" in err


@pytest.mark.night
def test_mpirun_carries_the_secret_itself_and_the_users_counts_where_there_is_one(run, tmp_path):
    for env in ({}, {"HVDLITE_SECRET": SECRET}):
        code, out, err = run(MPICH, tmp_path, GREET, **env)
        assert (code, out) == (0, "[0, 1, 2]\n" * 3), err
