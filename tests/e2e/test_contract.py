"""Launcher and library share little code: these tests check that they agree on the worker's environment."""

import logging
import sys
from pathlib import Path

import pytest
from hvdlite_launcher.cli import horovodrun_flags
from hvdlite_launcher.cli.flag_parser import HELP, Parser
from hvdlite_launcher.plan.hosts import Host, plan_slots
from hvdlite_launcher.plan.worker_environment import (
    OWN_VARIABLES,
    HostEnvironment,
    chosen_environment,
    slot_environment,
    variables_set,
)

from hvdlite.environment import (
    DEFAULT_STALL_WARNING_S,
    DEFAULT_TIMEOUT_S,
    OF_USERS,
    READ_BY_INIT,
    SET_FOR_WORKERS,
    Environment,
    read_environment,
)
from hvdlite.optim.optimizer import DEFAULT_BUCKET_CAP_BYTES
from hvdlite.rendezvous.launchers import LAUNCHERS, read_placement

TRAINING = """
import os, signal, sys
import torch
import hvdlite as hvd

hvd.init()
for step in range(1000):
    if step == 20 and hvd.rank() == 1:
        {fault}
    hvd.allreduce(torch.ones(4))
"""


def test_the_library_understands_what_the_flags_set():
    def read(*words: str) -> Environment:
        return read_environment(horovodrun_flags.variables(Parser().parse_args(words)))

    assert read("--no-stall-check", "--tcp", "--gloo") == Environment(stall_check=False)
    assert read(
        *("--fusion-threshold-mb", "1", "--timeline-filename", "/t.json", "--stall-check", "--log-level", "INFO"),
        *("--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "9"),
        *("--log-without-timestamp", "--gloo-timeout-seconds", "30"),
    ) == Environment(
        fusion_threshold_bytes=1 << 20,
        timeline="/t.json",
        stall_warning_s=5.0,
        stall_shutdown_s=9.0,
        log_level=logging.INFO,
        log_hide_time=True,
        timeout_s=30.0,
    )


def test_the_help_of_the_flags_names_the_librarys_own_defaults():
    help_of = {block.split()[0]: " ".join(block.split()) for block in horovodrun_flags.HELP.split("\n  --")}
    for flag, default in (
        ("gloo-timeout-seconds", DEFAULT_TIMEOUT_S),
        ("stall-check-warning-time-seconds", DEFAULT_STALL_WARNING_S),
        ("fusion-threshold-mb", DEFAULT_BUCKET_CAP_BYTES / 2**20),
    ):
        assert f"({default:g})" in help_of[flag], flag


@pytest.mark.parametrize(("name", "default"), [("START_TIMEOUT", 60), ("ELASTIC_TIMEOUT", 600)])
def test_the_help_of_hvdlite_run_has_the_tables_names_and_default_of_its_own_variables(name, default):
    variable = next(each for each in OF_USERS if each.name == name)
    assert f"({' or '.join(variable.names)} where it is set, else {default})" in " ".join(HELP.split())
    page = (Path(__file__).parents[2] / "docs" / "variables.md").read_text()
    assert f"| `HVDLITE_{name}` | ✓ | seconds | {default} |" in page


def test_the_library_reads_the_placement_that_the_launcher_planned():
    slots = plan_slots((Host("a", 2), Host("b", 1)))
    for slot in slots:
        own = slot_environment(slot, len(slots), master_address="a", master_port=1)
        environment = variables_set({}, own, HostEnvironment("/tmp/a job", 2, None, slot.local_size, is_alone=False))
        placement = read_placement(environment)
        assert (placement.rank, placement.size, placement.local_rank, placement.host) == (
            slot.rank,
            3,
            slot.local_rank,
            slot.host.name,
        )
        assert placement.store_url == "unix:///tmp/a job/store"


def test_of_other_launchers_variables_no_other_host_is_sent_any_and_workers_see_no_mpi_rank():
    for launcher in LAUNCHERS:
        names = {launcher.rank, launcher.size, launcher.local_rank, launcher.local_size, launcher.node}
        names |= {launcher.node_count, launcher.nodelist, launcher.reserved_ports, launcher.own_addresses}
        theirs = {*names, *launcher.job_id, *launcher.signs} - {None} - OWN_VARIABLES
        chosen = chosen_environment(dict.fromkeys(theirs, "1"), [], inherit=True)
        assert chosen.elsewhere == {}, launcher.name
        if launcher.hidden_from_workers:
            assert not {launcher.rank, *launcher.signs} & chosen.here.keys(), launcher.name


def test_the_librarys_table_has_what_hvdlite_run_sets_for_workers():
    assert {name for name in OWN_VARIABLES if name.startswith(("HVDLITE_", "HOROVOD_"))} == SET_FOR_WORKERS


def test_what_flags_of_horovodrun_set_is_read_by_the_library():
    variables = {flag.variable for flag in horovodrun_flags.FLAGS} - {None}
    assert variables - {"NCCL_IB_DISABLE"} <= {name for each in READ_BY_INIT.values() for name in each.names}


@pytest.mark.night
@pytest.mark.slow
def test_with_verbose_rank_0_says_once_how_ranks_are_connected(launch):
    program = "import hvdlite as hvd; hvd.init()"
    for flags, count in ((["--verbose"], 1), ([], 0)):
        code, _, err = launch("-np", "2", *flags, sys.executable, "-c", program, env={"HVDLITE_SHM": "0"}).ended()
        assert code == 0
        assert err.count(b"[0]<stderr>:hvdlite: 2 ranks on 1 host; CPU tensors: gloo (") == count, err.decode()
        assert err.count(b"2 ranks on 1 host") == count


@pytest.mark.night(but=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("raise ValueError('on purpose')", 1),
        ("os._exit(5)", 5),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_of_a_training_the_rank_that_died_is_named_and_not_those_that_lost_it(launch, fault, code):
    job = launch("-np", "3", sys.executable, "-c", TRAINING.format(fault=fault))
    returned, _, err = job.ended()
    report = err.decode().partition("hvdlite-run: ")[2]
    assert returned == code, err.decode()
    assert report.startswith("rank 1 on localhost"), err.decode()
    assert "PeerLostError" not in report
    job.assert_gone()
