"""The command line of hvdlite-run: what it accepts, and the one line for each error."""

import io
import json
import os
import signal
import sys

import pytest
from hvdlite_launcher.cli import flag_parser, hvdlite_run, watch_job
from hvdlite_launcher.status import console
from hvdlite_launcher.status.console import Console

OF_TORCHRUN = "is a flag of torchrun. Run hvdlite-run once, on one host: -np is the number of all workers, and -H"


def test_the_help_is_as_agreed(capsys, golden):
    assert hvdlite_run.main(["--help"]) == 0
    golden("help.txt", capsys.readouterr().out)


def test_every_flag_is_in_the_help_and_no_other():
    known = {name for flag in flag_parser.Parser().flags for name in flag.option_strings}
    in_help = {
        word.strip(",") for line in flag_parser.HELP.splitlines() for word in line.split() if line.startswith("  -")
    }
    assert known == {word for word in in_help if word.startswith("-")}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the number of workers is missing: give -np N, such as: hvdlite-run -np 4 python train.py"),
        (["true"], "the number of workers is missing"),
        (["-np", "2"], "no command to run"),
        (["-np", "2", "--"], "no command to run"),
        (["-np", "0", "true"], "-np/-n/--num-proc: '0' is not a number of workers, such as 4"),
        (["-np", "-1", "true"], "-np/-n/--num-proc"),
        (["-np", "x", "true"], "-np/-n/--num-proc: 'x' is not a number of workers"),
        (["-np", "1" * 5000, "true"], "-np/-n/--num-proc"),
        (["-np"], "-np/-n/--num-proc: expected one argument"),
        (["-np2", "true"], "-np/-n/--num-proc: 'p2' is not a number of workers"),
        (["-n", "two", "true"], "-np/-n/--num-proc: 'two' is not a number of workers, such as 4"),
        (["--verbsoe", "-np", "2", "true"], "unknown flag --verbsoe; did you mean --verbose?"),
        (
            ["--num-proc=2", "--bogus=1", "true"],
            "unknown flag --bogus; see hvdlite-run --help. Flags of your program come after its name",
        ),
        (["--nproc-per-node", "4", "true"], f"--nproc-per-node {OF_TORCHRUN}"),
        (["--nproc_per_node=4", "true"], f"--nproc_per_node {OF_TORCHRUN}"),
        (["-np", "4", "--nnodes", "2", "true"], f"--nnodes {OF_TORCHRUN}"),
        (["--verbose=1", "-np", "2", "true"], "--verbose: "),
        (["-H", "a:", "true"], "-H: 'a:' is not host:slots, such as node1:4"),
        (["-H", "", "true"], "-H: '' is not host:slots"),
        (["-H", "localhost:1", "--hostfile", "x", "true"], "-H and --hostfile both name the hosts"),
        (["--hostfile", "/no/such", "true"], "--hostfile /no/such: no such file or directory"),
        (
            ["--output-filename", "/dev/null/x", "-np", "1", "true"],
            "--output-filename: cannot write /dev/null: Not a directory",
        ),
        (["--output-filename", "", "-np", "1", "true"], "--output-filename: '' is not the name of a directory"),
        (
            ["-np", "1", "-x", "NOT_SET_HERE", "true"],
            "-x: 'NOT_SET_HERE' is not set here: write -x NAME=VALUE",
        ),
        (["-np", "1", "-x", "=s3cret", "true"], "-x: the name of the variable is missing: write -x NAME=VALUE\n"),
        (
            ["-np", "1", "-x", "HVDLITE_RANK=1", "true"],
            "-x: HVDLITE_RANK cannot be set: hvdlite-run sets it for each worker",
        ),
        (["-np", "1", "-x"], "-x: expected one argument"),
        (["-hostfile", "/", "true"], "--hostfile /: is a directory"),
        (["-H", "localhost:2", "-np", "3", "true"], "-np 3 is more than the 2 slots of the hosts"),
        (
            ["--network-interface", "eth0,node7=eth1", "-np", "1", "true"],
            "--network-interface: 'node7' is not one of the hosts",
        ),
        (
            ["--network-interface", "eth0,", "-np", "1", "true"],
            "--network-interface/--network-interfaces: 'eth0,' is not an interface",
        ),
        (["--ssh-args=-v -n", "-np", "1", "true"], "--ssh-args: ssh -n does not start a command with"),
        (
            ["--known-hosts", "--ssh-program", "kubexec", "-np", "1", "true"],
            "--known-hosts is for ssh, which knows",
        ),
        (["--debug-rank", "1", "-np", "2", "--min-np", "1", "true"], "--debug-rank: in an elastic job a rank that"),
        (["--debug-rank", "last", "-np", "2", "true"], "--debug-rank: 'last' is not a whole number"),
        (["-p", "0", "-np", "1", "true"], "-p/--ssh-port: '0' is not a port, such as 22"),
        (["--ssh-args", "'", "-np", "1", "true"], '--ssh-args: "\'" cannot be split into words: no closing quotation'),
        (["--grace", "-1", "-np", "2", "true"], "--grace: '-1' is not a number of seconds"),
        (["--grace", "nan", "-np", "2", "true"], "--grace: 'nan'"),
        (["--grace", "soon", "-np", "2", "true"], "--grace: 'soon' is not a number of seconds"),
        (["--grace", "86401", "-np", "2", "true"], "--grace: '86401' is not a number of seconds up to a day"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(argv, said, capsys):
    assert hvdlite_run.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"hvdlite-run: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "own", "command"),
    [
        (["-n", "2", "cmd", "-n", "3"], ["-n", "2"], ["cmd", "-n", "3"]),
        (["-n2", "cmd"], ["-n2"], ["cmd"]),
        (["-np", "2", "python", "x.py", "-np", "3"], ["-np", "2"], ["python", "x.py", "-np", "3"]),
        (["-np", "2", "--verbose", "--", "--odd", "--"], ["-np", "2", "--verbose"], ["--odd", "--"]),
        (["-np", "2", "-x", "A=1", "-xB", "cmd", "-x", "C"], ["-np", "2", "-x", "A=1", "-xB"], ["cmd", "-x", "C"]),
        (["--grace=1", "-H", "a:1", "cmd", "--", "x"], ["--grace=1", "-H", "a:1"], ["cmd", "--", "x"]),
        (["-np"], ["-np"], []),
    ],
)
def test_flags_after_the_command_are_its_own(argv, own, command):
    assert flag_parser.Parser().split_command(argv) == (own, command)


@pytest.mark.parametrize("argv", [["-n", "2"], ["-n2"], ["-np", "2"], ["--num-proc", "2"], ["--num-proc=2"]])
def test_the_number_of_workers_may_be_given_as_mpirun_and_srun_have_it(argv, capsys):
    assert hvdlite_run.main([*argv, "--dry-run"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("rank")] == ["0", "1"]


@pytest.mark.parametrize(
    ("words", "interfaces"),
    [
        (["--network-interface", "eth0"], {"": "eth0"}),
        (["--network-interfaces", "eth0,ib0"], {"": "eth0,ib0"}),
        (["--network-interface", "eth0", "--network-interface", "a=ib0,b=lan0"], {"": "eth0", "a": "ib0", "b": "lan0"}),
        (["--network-interface=a=eth0", "--network-interface=a=ib0"], {"a": "eth0,ib0"}),
        ([], {}),
    ],
)
def test_interfaces_may_be_several_for_all_hosts_or_for_one(words, interfaces):
    assert flag_parser.Parser().parse_args(words).network_interface == interfaces


def test_of_several_interfaces_the_plan_shows_that_one_will_be_taken(capsys):
    assert hvdlite_run.main(["-np", "1", "--network-interface", "eth0,ib0", "--dry-run"]) == 0
    assert "GLOO_SOCKET_IFNAME=<the first of eth0,ib0 that the host has>" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "grace_s"), [([], 30), (["--grace", "0"], 0), (["--grace", "86400"], 86400)])
def test_workers_have_half_a_minute_after_a_signal_or_what_is_asked_for(words, grace_s):
    assert hvdlite_run.job_of(hvdlite_run.read_flags(["-np", "1", *words]), ["true"]).grace_s == grace_s


def start_timeout_s(*words: str) -> float:
    return hvdlite_run.job_of(hvdlite_run.read_flags(["-np", "1", *words]), ["true"]).start_timeout_s


def test_how_long_a_start_may_take_is_said_by_flag_or_variable(monkeypatch, capsys):
    assert start_timeout_s() == 60
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "7")
    assert start_timeout_s() == 7
    monkeypatch.setenv("HVDLITE_START_TIMEOUT", "8")
    assert start_timeout_s() == 8
    assert start_timeout_s("--start-timeout", "60") == 60
    monkeypatch.setenv("HVDLITE_START_TIMEOUT", "soon")
    assert hvdlite_run.main(["-np", "1", "true"]) == 2
    assert capsys.readouterr().err.startswith("hvdlite-run: HVDLITE_START_TIMEOUT: 'soon' is not a number of seconds")
    assert hvdlite_run.main(["-np", "1", "--start-timeout", "0", "true"]) == 2
    assert capsys.readouterr().err.startswith("hvdlite-run: --start-timeout: '0' is not more than 0 seconds")


def test_a_value_that_looks_like_a_flag_is_asked_for_after_an_equals_sign(capsys):
    assert hvdlite_run.main(["-np", "1", "--mpi-args", "-mca", "true"]) == 2
    assert capsys.readouterr().err == (
        "hvdlite-run: --mpi-args: expected one argument; if it begins with a dash, write --mpi-args=VALUE\n"
    )


@pytest.mark.parametrize("asked", [["--ps"], ["--report", "1"], ["--diagnose", "1"]])
def test_a_question_about_running_jobs_starts_no_command(asked, capsys):
    assert hvdlite_run.main([*asked, "python", "train.py"]) == 2
    assert f"{asked[0]} starts no command: leave out 'python'" in capsys.readouterr().err


def test_two_questions_about_running_jobs_are_refused(capsys):
    assert hvdlite_run.main(["--ps", "--diagnose", "1"]) == 2
    assert "--ps and --diagnose ask for different things" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [["--ps"], ["--report", "1"], ["--diagnose", "1"], ["--watch"]])
def test_flags_that_have_no_effect_on_a_running_job_are_refused(asked, capsys):
    command = ["4242"] if asked == ["--watch"] else []
    assert hvdlite_run.main([*asked, "-np", "2", *command]) == 2
    assert f"{asked[0]} of a running job starts none: leave out -np/-n/--num-proc" in capsys.readouterr().err


@pytest.fixture
def jobs(monkeypatch):
    """Provides the list of this user's jobs that are found here, which is empty at first."""
    found: list[int] = []
    monkeypatch.setattr(console, "running_jobs", lambda: found)
    monkeypatch.setattr(console, "elsewhere", list)
    return found


@pytest.mark.parametrize("flag", ["--report", "--diagnose", "--watch"])
def test_without_a_number_the_one_job_that_runs_is_meant(flag, jobs, capsys, monkeypatch):
    monkeypatch.setattr(watch_job, "_asked_again", lambda *_: None)
    monkeypatch.setattr(watch_job, "_LINE_EACH_S", 0.0)
    monkeypatch.setattr(watch_job, "_SOON_S", 0.0)
    assert hvdlite_run.main([flag]) == 2
    assert f"{flag}: none of your jobs runs here" in capsys.readouterr().err
    jobs.append(os.getpid())
    view = {"age_s": 1, "command": "c", "generation": None, "faults": 0, "ranks": [], "hosts": {}}

    def answer(asked):
        asked.answer(*([view] if flag == "--watch" else ["the report", {"verdict": "goes on", "ranks": []}]))

    before = signal.getsignal(signal.SIGINT)
    try:
        with Console(answer, dict):
            assert hvdlite_run.main([flag]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    said = {"--report": "the report", "--diagnose": "goes on", "--watch": f"hvdlite-run {os.getpid()} has ended"}
    assert said[flag] in capsys.readouterr().out
    jobs.append(1)
    assert hvdlite_run.main([flag]) == 2
    assert f"{flag}: 2 of your jobs run here; give the PID of one of them (--ps lists them)" in capsys.readouterr().err


def test_watch_with_other_flags_and_no_command_lacks_its_command(capsys):
    assert hvdlite_run.main(["--watch", "-np", "2"]) == 2
    assert "no command to run" in capsys.readouterr().err


def test_after_a_question_without_a_number_a_flag_is_a_flag(capsys):
    assert hvdlite_run.main(["--report", "--no-env"]) == 2
    assert "--report of a running job starts none: leave out --no-env" in capsys.readouterr().err


def test_a_job_that_is_gone_cannot_be_watched(capsys):
    assert hvdlite_run.main(["--watch", str(os.getpid())]) == 2
    assert f"--watch: no hvdlite-run with the process number {os.getpid()} runs here" in capsys.readouterr().err


def test_a_job_of_another_version_cannot_be_watched(capsys):
    with Console(lambda asked: asked.answer({"ranks": 3}), dict):
        assert hvdlite_run.main(["--watch", str(os.getpid())]) == 1
    assert "is of another version" in capsys.readouterr().err


@pytest.mark.parametrize(("verdict", "code"), [("goes on", 0), ("stands still", 3), ("not known", 4)])
def test_the_exit_code_of_diagnose_is_its_verdict(verdict, code, capsys):
    def answer(asked):
        asked.answer("text", {"verdict": verdict, "ranks": []})

    with Console(answer, dict):
        assert hvdlite_run.main(["--diagnose", str(os.getpid())]) == code
    assert json.loads(capsys.readouterr().out) == {"verdict": verdict, "ranks": []}


def test_a_report_is_shown_also_where_its_characters_cannot_be_encoded(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    with Console(lambda asked: asked.answer("rank – of {modèle}", {}), dict):
        assert hvdlite_run.main(["--report", str(os.getpid())]) == 0
    assert written.getvalue() == rb"rank \u2013 of {mod\xe8le}" + b"\n"
