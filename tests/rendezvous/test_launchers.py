"""Each launcher's variables give a process its place, which the programs that it starts do not have."""

from __future__ import annotations

import os

import pytest

import hvdlite as hvd
from hvdlite.errors import LaunchEnvironmentError
from hvdlite.rendezvous import launchers
from hvdlite.rendezvous.launchers import (
    LAUNCHERS,
    Launcher,
    launcher_named,
    mark_taken,
    read_placement,
    refuse_horovod_rank,
    require_free,
)
from hvdlite.rendezvous.placement import Placement

HVDLITE = {
    "HVDLITE_RANK": "1", "HVDLITE_SIZE": "4", "HVDLITE_LOCAL_RANK": "1", "HVDLITE_LOCAL_SIZE": "2",
    "HVDLITE_CROSS_RANK": "0", "HVDLITE_CROSS_SIZE": "2", "HVDLITE_HOST": "node1", "HVDLITE_STORE": "unix:///s",
    "HVDLITE_WORKER": "1",
}  # fmt: skip
WORKER = HVDLITE | {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "40000",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip


OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_SERVER_URI2": "7.2;tcp4://127.0.0.1:1", "PMIX_RANK": "2",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "n1",
}  # fmt: skip
SBATCH = {
    "SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip
SRUN = SBATCH | {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (OPENMPI, (2, 3, "7.2;tcp4://127.0.0.1:1", 0, "OpenMPI's mpirun", False)),
        (MPICH, (1, 3, "n1", 1, "MPICH's mpirun", True)),
        (SRUN, (3, 4, "1", 1, "Slurm's srun", False)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "HVDLITE_HOST": "a"}, (1, 2, "a", None, "MPICH's mpirun", False)),
    ],
)
def test_mpirun_and_srun_tell_places_and_no_address(environ, place):
    placement = read_placement(environ)
    assert (
        placement.rank,
        placement.size,
        placement.node,
        placement.local_rank,
        placement.launcher,
        placement.one_host,
    ) == place


def test_the_shell_of_a_slurm_job_is_no_step():
    assert read_placement(SBATCH) is None
    assert read_placement({name: value for name, value in SBATCH.items() if name != "SLURM_PROCID"}) is None


def test_one_rank_of_another_launcher_is_a_plain_program():
    assert read_placement(MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}) is None
    assert read_placement(SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize("around", [OPENMPI, MPICH, SRUN, OPENMPI | SRUN])
def test_torchrun_wins_within_an_mpi_or_slurm_job(around):
    placement = read_placement(around | TORCHRUN)
    assert (placement.rank, placement.size, placement.launcher) == (3, 4, None)


def test_hvdlite_run_wins_within_a_slurm_job():
    assert read_placement(SRUN | WORKER).rank == 1


@pytest.mark.parametrize(
    ("inner", "rank", "launcher"),
    [(OPENMPI, 2, "OpenMPI's mpirun"), (MPICH, 1, "MPICH's mpirun"), (TORCHRUN, 3, None)],
)
def test_what_a_worker_of_hvdlite_run_starts_by_another_launcher_has_that_ones_place(inner, rank, launcher):
    # hvdlite-run passes no variable of a surrounding MPI job to its workers, and sets RANK to the value of its own.
    placement = read_placement(WORKER | inner)
    assert (placement.rank, placement.launcher, placement.store_url) == (rank, launcher, None)


@pytest.mark.parametrize(("mpi", "rank"), [(OPENMPI, 2), (MPICH, 1)])
def test_mpirun_wins_over_slurm_by_which_it_starts_its_daemons(mpi, rank):
    assert read_placement(SRUN | mpi).rank == rank


def test_a_pmi_rank_that_slurm_sets_besides_is_slurms():
    assert read_placement(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}).launcher == "Slurm's srun"


@pytest.mark.parametrize("environ", [OPENMPI, MPICH, SRUN])
def test_an_address_of_the_users_own_is_taken_with_the_launchers_places(environ):
    given_address = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    placement = read_placement(environ | given_address)
    assert (placement.rank, placement.launcher) == (read_placement(environ).rank, None)
    for name, value in given_address.items():
        with pytest.raises(hvd.LaunchEnvironmentError, match=f"only {name} is set: .* set both"):
            read_placement(environ | {name: value})
    with pytest.raises(hvd.LaunchEnvironmentError, match="MASTER_PORT='x' is not a number"):
        read_placement(environ | {"MASTER_ADDR": "n1", "MASTER_PORT": "x"})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            OPENMPI | {"OMPI_COMM_WORLD_RANK": "5"},
            "OMPI_COMM_WORLD_RANK=5 is not below OMPI_COMM_WORLD_SIZE=3: .*OpenMPI",
        ),
        (MPICH | {"PMI_SIZE": "x"}, "PMI_SIZE='x' is not a number; MPICH"),
        (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not below SLURM_STEP_NUM_TASKS=4: .*Slurm"),
        ({"MPI_LOCALRANKID": "0"}, "PMI_SIZE is not set.*MPICH"),
        (SBATCH | {"SLURM_STEP_ID": "0"}, "SLURM_STEP_NUM_TASKS is not set.*Slurm"),
    ],
)
def test_what_is_wrong_with_another_launchers_variables_is_named_with_it(environ, said):
    with pytest.raises(hvd.LaunchEnvironmentError, match=said):
        read_placement(environ)


def test_no_launcher_is_no_placement():
    assert read_placement({}) is None


def test_a_place_by_horovods_variables_alone_is_an_error_that_names_the_way_out(monkeypatch):
    given = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        hvd.LaunchEnvironmentError, match=r"HOROVOD_RANK=1 and HOROVOD_SIZE=2 .* hvdlite-run, or .*RANK"
    ):
        hvd.init()
    for other in ({"HOROVOD_SIZE": "1"}, WORKER, {"HOROVOD_SIZE": "two"}):
        refuse_horovod_rank(given | other)
    refuse_horovod_rank({"HOROVOD_SIZE": "2"})


def test_hvdlite_run_tells_rank_host_and_store():
    assert read_placement(HVDLITE) == Placement(1, 4, "node1", "node1", 1, "unix:///s", worker=1)


def test_torchrun_tells_rank_and_node():
    placement = read_placement(TORCHRUN)
    assert (placement.rank, placement.size, placement.node, placement.local_rank, placement.store_url) == (
        3,
        4,
        "1",
        1,
        None,
    )


PAI = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize("name", ["NPROC_PER_NODE", "PET_NPROC_PER_NODE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("count", ["8", "auto"])
def test_ranks_that_count_nodes_of_several_processes_are_refused_with_the_command_to_use(name, count):
    said = f"RANK=1 and WORLD_SIZE=2 seem to count nodes, .*{name}={count} .*torchrun .*--nproc-per-node .{name} "
    with pytest.raises(hvd.LaunchEnvironmentError, match=said):
        read_placement(PAI | {name: count})
    assert read_placement(PAI | {name: count, "LOCAL_RANK": "1"}).rank == 1


@pytest.mark.parametrize("environ", [PAI, PAI | {"NPROC_PER_NODE": "1"}, PAI | {"NPROC_PER_NODE": ""}])
def test_ranks_that_count_nodes_of_one_process_are_ranks(environ):
    placement = read_placement(environ)
    assert (placement.rank, placement.size, placement.local_rank) == (1, 2, None)


def test_azure_mls_jobs_tell_ranks_by_mpirun_or_as_torchrun_does():
    # Of type "mpi", with the address that Azure ML sets beside mpirun's variables; and of type "pytorch".
    of_mpi = read_placement(OPENMPI | {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105", "AZUREML_RUN_ID": "r"})
    assert (of_mpi.rank, of_mpi.size, of_mpi.local_rank, of_mpi.launcher) == (2, 3, 0, None)
    places = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    of_pytorch = read_placement(places | {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105"})
    assert (of_pytorch.rank, of_pytorch.size, of_pytorch.local_rank) == (3, 4, 1)


def test_hvdlite_run_inside_another_launchers_job_wins():
    assert read_placement(TORCHRUN | WORKER).rank == 1


@pytest.mark.parametrize("name", ["HVDLITE_SIZE", "HVDLITE_LOCAL_RANK", "HVDLITE_STORE", "HVDLITE_WORKER"])
def test_a_missing_variable_is_named(name):
    with pytest.raises(hvd.LaunchEnvironmentError, match=f"{name} is not set"):
        read_placement({key: value for key, value in HVDLITE.items() if key != name})


@pytest.mark.parametrize(("name", "value"), [("HVDLITE_RANK", "x"), ("HVDLITE_RANK", "4"), ("HVDLITE_SIZE", "-1")])
def test_a_wrong_variable_is_named_with_its_value(name, value):
    with pytest.raises(hvd.LaunchEnvironmentError, match=name):
        read_placement(HVDLITE | {name: value})


def test_torchruns_missing_address_is_named():
    with pytest.raises(hvd.LaunchEnvironmentError, match="MASTER_ADDR is not set"):
        read_placement({"RANK": "0", "WORLD_SIZE": "1"})


FLUX = Launcher(
    "Flux",
    signs=("FLUX_TASK_RANK",),
    rank="FLUX_TASK_RANK",
    size="FLUX_JOB_SIZE",
    local_rank="FLUX_TASK_LOCAL_ID",
)


def test_a_new_launcher_is_one_entry(monkeypatch):
    environ = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "HVDLITE_HOST": "n2"}
    assert read_placement(environ) is None
    monkeypatch.setattr(launchers, "LAUNCHERS", (*LAUNCHERS, FLUX))
    assert read_placement(environ) == Placement(3, 4, "n2", "n2", 1, launcher="Flux")
    with pytest.raises(hvd.LaunchEnvironmentError, match=r"^FLUX_JOB_SIZE is not set, .* started by Flux: "):
        read_placement({"FLUX_TASK_RANK": "3"})
    address = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert read_placement(environ | address) == Placement(3, 4, "n2", "n2", 1)


@pytest.mark.parametrize("environ", [HVDLITE, TORCHRUN, OPENMPI, MPICH, SRUN, {"PMI_RANK": "1", "PMI_SIZE": "2"}])
def test_a_place_is_read_from_the_processs_own_environment_too(environ, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert read_placement(os.environ) == read_placement(environ)


def test_every_optional_variable_of_a_launcher_is_one_of_its_own():
    for launcher in LAUNCHERS:
        assert {*launcher.optional} <= {launcher.local_rank, launcher.node}, launcher.name


def test_the_ranks_of_launchers_that_share_a_name_meet_in_the_same_way():
    for launcher in LAUNCHERS:
        same = launcher_named(launcher.name)
        ways = [
            (each.job_id, each.nodelist, each.reserved_ports, each.own_addresses, each.is_asked_by_pmi)
            for each in (launcher, same)
        ]
        assert ways[0] == ways[1], launcher.name


OTHERS_TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.fixture
def by_another(monkeypatch):
    """Returns a function that marks a place as another process does."""

    def mark(environ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 7)
            mark_taken(environ)

    return mark


def test_the_place_of_the_rank_that_started_this_program_is_refused(by_another, monkeypatch):
    for name, value in OTHERS_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HVDLITE_PLACE_TAKEN", raising=False)
    by_another(os.environ)
    with pytest.raises(LaunchEnvironmentError, match=r"was started by a rank of the job \(pid 7\).*leave hvd.init"):
        hvd.init()
    os.environ.pop("HVDLITE_PLACE_TAKEN")


def test_the_rank_itself_another_place_and_no_place_are_free(by_another):
    own = dict(OTHERS_TORCHRUN)
    mark_taken(own)
    require_free(own)
    taken = dict(OTHERS_TORCHRUN)
    by_another(taken)
    require_free({**taken, "MASTER_PORT": "4321"})
    require_free({"HVDLITE_PLACE_TAKEN": taken["HVDLITE_PLACE_TAKEN"]})


def test_the_only_rank_of_a_job_leaves_no_mark(by_another):
    alone = {**OTHERS_TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    by_another(alone)
    require_free(alone)
    assert "HVDLITE_PLACE_TAKEN" not in alone


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"])
def test_variables_that_are_not_a_whole_place_are_no_error(by_another, missing):
    """As in a process whose group was made before `hvd.init`, which says itself what is missing if it needs it."""
    some = {name: value for name, value in OTHERS_TORCHRUN.items() if name != missing}
    by_another(some)
    require_free({**some, "HVDLITE_PLACE_TAKEN": "7 of another"})
