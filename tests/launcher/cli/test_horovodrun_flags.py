"""Horovodrun's flags that tune a job: each does what it did there, or one line says why it does not."""

import re

import pytest
from hvdlite_launcher.cli import horovodrun_flags, hvdlite_run
from hvdlite_launcher.cli.flag_parser import HELP, Parser

# The flags as horovodrun's users know them; flags about hosts and ranks are hvdlite-run's own too.
HOROVODRUNS = """\
    -v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
    --network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
    --fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce
    --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune
    --no-autotune --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
    --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc --max-np
    --max-num-proc --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range
    --host-discovery-script --timeline-filename --timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check
    --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --mpi-threads-disable
    --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
    --gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp -prefix-timestamp
    --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile
    --gloo --mpi --jsrun -h --help
"""
VALUES = {
    "--log-level": "INFO", "--autotune-gaussian-process-noise": "0.5", "--mpi-args": "-mca x 1",
    "--timeline-filename": "t.json",
}  # fmt: skip
IDLE = [row for row in horovodrun_flags.FLAGS if row.variable is None]


def set_by(*words: str) -> dict[str, str]:
    return horovodrun_flags.variables(Parser().parse_args(words))


def test_every_flag_of_horovodruns_is_known():
    assert set(HOROVODRUNS.split()) <= {name for flag in Parser().flags for name in flag.option_strings}


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--fusion-threshold-mb", "32"], {"HVDLITE_FUSION_THRESHOLD": "33554432"}),
        (["--fusion-threshold-mb=0"], {"HVDLITE_FUSION_THRESHOLD": "0"}),
        (["--autotune"], {"HVDLITE_AUTOTUNE": "1"}),
        (["--autotune", "--no-autotune"], {"HVDLITE_AUTOTUNE": "0"}),
        (["--timeline-filename", "DYNAMIC"], {"HVDLITE_TIMELINE": "DYNAMIC"}),
        (["--no-stall-check"], {"HVDLITE_STALL_CHECK_DISABLE": "1"}),
        (["--no-stall-check", "--stall-check"], {"HVDLITE_STALL_CHECK_DISABLE": "0"}),
        (["--stall-check-warning-time-seconds", "5"], {"HVDLITE_STALL_CHECK_TIME_S": "5"}),
        (["--stall-check-shutdown-time-seconds", "0"], {"HVDLITE_STALL_SHUTDOWN_S": "0"}),
        (["--gloo-timeout-seconds", "30"], {"HVDLITE_GLOO_TIMEOUT_SECONDS": "30"}),
        (["--log-level", "DEBUG"], {"HVDLITE_LOG_LEVEL": "debug"}),
        (["--log-without-timestamp"], {"HVDLITE_LOG_HIDE_TIME": "1"}),
        (["--log-hide-timestamp", "--log-with-timestamp"], {"HVDLITE_LOG_HIDE_TIME": "0"}),
        (["--no-log-hide-timestamp"], {"HVDLITE_LOG_HIDE_TIME": "0"}),
        (["--hierarchical-allreduce"], {"HVDLITE_HIERARCHICAL_ALLREDUCE": "1"}),
        (["--hierarchical-allreduce", "--no-hierarchical-allreduce"], {"HVDLITE_HIERARCHICAL_ALLREDUCE": "0"}),
        (["--tcp"], {"NCCL_IB_DISABLE": "1"}),
        (["--gloo"], {}),
        ([], {}),
    ],
)
def test_what_can_be_tuned_is_a_variable_of_the_workers(words, variables):
    assert set_by(*words) == variables


def test_files_are_where_the_user_is_wherever_the_program_goes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert set_by("--timeline-filename", "t.json") == {"HVDLITE_TIMELINE": f"{tmp_path}/t.json"}
    assert set_by("--timeline-filename", "traces/") == {"HVDLITE_TIMELINE": f"{tmp_path}/traces/"}
    assert set_by("--autotune-log-file", "DYNAMIC") == {"HVDLITE_AUTOTUNE_LOG": f"{tmp_path}/DYNAMIC"}


@pytest.mark.parametrize("row", IDLE, ids=lambda row: row.names[0])
def test_what_cannot_is_one_line_that_says_why_unless_it_is_so_anyway(row, capsys):
    name = row.names[0]
    words = [name] if row.read is None else [f"{name}={VALUES.get(name, '7')}"]
    assert hvdlite_run.main(["-np", "1", *words, "--dry-run"]) == 0
    said = capsys.readouterr().err
    if name == "--gloo" or (name.startswith("--no-") and name != "--no-mpi-threads-disable"):
        assert said == ""
    else:
        assert re.fullmatch(rf"hvdlite-run: {name} has no effect: .{{15,}}\n", said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fusion-threshold-mb", "-1"], "fusion_threshold_mb=-1 must be >= 0"),
        (["--cycle-time-ms=-1"], "cycle_time_ms=-1 must be >= 0"),
        (["--cache-capacity", "many"], "--cache-capacity: 'many' is not a number, such as 60"),
        (["--autotune-gaussian-process-noise", "2"],
         "autotune_gaussian_process_noise=2 must be in [0, 1]"),
        (["--gloo-timeout-seconds", "0"], "gloo_timeout_seconds=0 must be > 0"),
        (
            ["--log-level", "loud"],
            "--log-level: 'loud' is not a log level: use one of TRACE, DEBUG, INFO, WARNING, ERROR, FATAL",
        ),
        (["--timeline-filename", ""], "--timeline-filename: '' is not the name of a file"),
        (["--autotune-log-file", ""], "--autotune-log-file: '' is not the name of a file"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_in_horovods_words_where_it_has_them(words, said, capsys):
    asked = words if "--check" in words else ["-np", "1", *words, "true"]
    assert hvdlite_run.main(asked) == 2
    assert capsys.readouterr().err == f"hvdlite-run: {said}\n"


def test_what_the_flags_set_is_shown_with_the_plan_and_x_has_the_last_word(capsys, monkeypatch):
    monkeypatch.setenv("HVDLITE_LOG_LEVEL", "error")
    flags = ["--tcp", "--log-level", "INFO", "--fusion-threshold-mb", "1", "--horovod"]
    assert hvdlite_run.main(["-np", "1", *flags, "-x", "HVDLITE_FUSION_THRESHOLD=0", "--dry-run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {"    NCCL_IB_DISABLE=1", "    HVDLITE_LOG_LEVEL=info", "    HVDLITE_FUSION_THRESHOLD=0"} <= set(shown)
    assert any(line.startswith("    PYTHONPATH=<") for line in shown)


def test_the_short_names_of_horovodruns_are_there(capsys):
    assert hvdlite_run.main(["-v"]) == 0
    assert capsys.readouterr().out.startswith("hvdlite-run ")
    assert Parser().parse_args(["-cb"]).check
    assert horovodrun_flags.HELP in HELP
