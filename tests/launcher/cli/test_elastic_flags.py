"""What makes a job elastic, what it is to do after failures, and the one line for what cannot be."""

import pytest
from hvdlite_launcher.cli import hvdlite_run
from hvdlite_launcher.cli.config_file import config_words
from hvdlite_launcher.cli.flag_parser import Parser
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.plan.job_spec import ON_FAILURE, DiscoveryScript, ElasticSpec, Policy, RestartSpec


@pytest.fixture(autouse=True)
def _no_timeout_is_set(monkeypatch):
    monkeypatch.delenv("HVDLITE_ELASTIC_TIMEOUT", raising=False)
    monkeypatch.delenv("HOROVOD_ELASTIC_TIMEOUT", raising=False)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "find hosts.sh"
    path.write_text("#!/bin/sh\necho localhost:2\n")
    path.chmod(0o755)
    return str(path)


def job(*words: str):
    flags, command = Parser().split_command([*words, "true"])
    return hvdlite_run.job_of(hvdlite_run.read_flags(flags), command)


def policy(*words: str) -> Policy:
    elastic = job(*words).elastic
    assert elastic is not None
    return elastic.policy


def said(capsys, *words: str) -> str:
    assert hvdlite_run.main([*words, "true"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("hvdlite-run: ").rstrip()


@pytest.mark.parametrize("words", [["-np", "2"], ["-H", "localhost:2"], ["-np", "2", "--on-failure", "stop"]])
def test_a_job_is_not_elastic_unless_that_is_asked_for(words):
    assert (job(*words).elastic, job(*words).restart) == (None, None)


@pytest.mark.parametrize("name", ["--min-np", "--min-num-proc", "--min-np=2", "--min-num"])
def test_the_least_number_of_workers_makes_it_elastic_with_no_upper_bound(name):
    words = [name] if "=" in name else [name, "2"]
    assert job(*words, "-H", "localhost:4").elastic == ElasticSpec(Policy(min_np=2))


def test_it_begins_with_np_and_stays_between_the_least_and_the_most():
    assert policy("-np", "3", "--min-np", "2", "--max-np", "4", "-H", "localhost:4") == Policy(
        min_np=2, start_np=3, max_np=4
    )


def test_a_script_makes_it_elastic_and_np_is_then_the_least_number(script):
    found = job("-np", "2", "--host-discovery-script", script)
    assert found.hosts == ()
    assert found.elastic.policy == Policy(min_np=2, start_np=2)


def test_a_script_is_run_where_the_user_is_and_a_path_need_not_be_quoted(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    by_path = job("--min-np", "1", "--host-discovery-script", "./find hosts.sh", "--slots", "4").elastic.discovery
    assert by_path == DiscoveryScript(f"'{script}'", str(tmp_path), slots_per_host=4)
    by_words = job("--min-np", "1", "--host-discovery-script", "echo localhost:2").elastic.discovery
    assert by_words == DiscoveryScript("echo localhost:2", str(tmp_path), slots_per_host=1)


def test_without_hosts_this_machine_has_a_slot_for_each_worker_and_each_spare():
    assert [host.slots for host in job("--min-np", "2").hosts] == [2]
    assert [host.slots for host in job("--min-np", "2", "-np", "3").hosts] == [3]
    assert [host.slots for host in job("--min-np", "2", "--max-np", "4", "--spares", "2").hosts] == [6]


@pytest.mark.parametrize("answer", ["replace", "blacklist"])
def test_a_job_whose_workers_are_replaced_keeps_its_size(answer):
    assert policy("-np", "2", "--on-failure", answer) == Policy(
        min_np=2, start_np=2, max_np=2, on_failure=ON_FAILURE[answer]
    )


def test_a_failure_is_answered_as_horovodrun_does_where_its_programs_run():
    assert policy("--min-np", "2").on_failure is ON_FAILURE["replace"]
    assert policy("--min-np", "2", "--horovod").on_failure is ON_FAILURE["blacklist"]
    assert policy("--min-np", "2", "--horovod", "--on-failure", "replace").on_failure is ON_FAILURE["replace"]
    assert policy("--min-np", "2", "--on-failure", "stop").on_failure is ON_FAILURE["stop"]


def test_workers_are_forked_where_others_are_replaced_unless_that_is_turned_off():
    assert job("--min-np", "2").elastic.forks
    assert job("-np", "2", "--on-failure", "replace").elastic.forks
    assert not job("--min-np", "2", "--no-fork-server").elastic.forks
    assert not job("--min-np", "2", "--on-failure", "shrink").elastic.forks
    assert not job("--min-np", "2", "--on-failure", "blacklist").elastic.forks


def test_limits_are_those_that_are_given():
    words = ["--elastic-timeout", "5", "--reset-limit", "0", "--max-restarts", "0"]
    assert policy("--min-np", "1", *words, "--blacklist-cooldown-range", "10", "600") == Policy(
        min_np=1, elastic_timeout_s=5, reset_limit=0, max_restarts=0, cooldown_s=(10, 600)
    )


def test_how_long_to_wait_for_workers_is_said_by_flag_or_variable(monkeypatch, capsys):
    assert policy("--min-np", "1").elastic_timeout_s == 600
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "7")
    assert policy("--min-np", "1").elastic_timeout_s == 7
    monkeypatch.setenv("HVDLITE_ELASTIC_TIMEOUT", "8")
    assert policy("--min-np", "1").elastic_timeout_s == 8
    assert policy("--min-np", "1", "--elastic-timeout", "9").elastic_timeout_s == 9
    monkeypatch.setenv("HVDLITE_ELASTIC_TIMEOUT", "soon")
    assert said(capsys, "--min-np", "1").startswith("HVDLITE_ELASTIC_TIMEOUT: 'soon' is not a number of seconds")


def test_a_job_may_start_anew_after_a_failure_without_being_elastic():
    restarting = job("-np", "4", "--on-failure", "restart")
    assert (restarting.elastic, restarting.restart) == (None, RestartSpec(max_restarts=3, min_np=4))
    words = ["--min-np", "2", "--on-failure", "restart", "--max-restarts", "0"]
    assert job("-np", "4", *words).restart == RestartSpec(max_restarts=0, min_np=2)
    assert job("-H", "localhost:4", "--on-failure", "restart").restart == RestartSpec(max_restarts=3, min_np=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--min-np", "4", "--max-np", "2"], "--min-np 4 is more than --max-np 2"),
        (["-np", "1", "--min-np", "2"], "-np 1 is less than --min-np 2"),
        (["-np", "8", "--min-np", "2", "--max-np", "4"], "-np 8 is more than --max-np 4"),
        (["-np", "2", "--min-np", "4", "--on-failure", "restart"], "--min-np 4 is more than -np 2"),
        (["--min-np", "3", "-H", "localhost:2"], "--min-np 3 is more than the 2 slots of the hosts"),
        (["-np", "3", "--min-np", "2", "-H", "localhost:2"], "-np 3 is more than the 2 slots of the hosts"),
        (["--min-np", "0"], "--min-np/--min-num-proc: '0' is not a number of workers"),
        (["--min-np", "2", "--spares", "1"], "--spares are workers beyond --max-np: say --max-np N"),
        (
            ["--min-np", "1", "--max-np", "2", "--spares", "1", "-H", "localhost:2"],
            "--spares 1: the hosts have 2 slots, and --max-np 2 leaves too few",
        ),
        (
            ["--min-np", "1", "--max-np", "2", "--spares", "1", "--on-failure", "shrink"],
            "--spares take the places of others, which --on-failure shrink leaves empty",
        ),
        (["-np", "2", "--on-failure", "shrink"], "--on-failure shrink: with how few workers may the job go on?"),
        (["--on-failure", "replace", "-H", "localhost:2"], "how many workers? An elastic job needs --min-np N"),
        (["--host-discovery-script", "echo a:2"], "how many workers? An elastic job needs --min-np N"),
        (["-np", "2", "--on-failure", "retry"], "--on-failure: 'retry' is none of replace, shrink, blacklist, restart"),
        (["-np", "2", "--max-restarts", "1"], "--max-restarts: nothing is started anew; say --on-failure restart"),
        (["-np", "2", "--max-np", "4"], "--max-np has no meaning here: the job's ranks do not change without --min-np"),
        (["-np", "2", "--reset-limit", "4"], "--reset-limit has no meaning here"),
        (["-np", "2", "--elastic-timeout", "4"], "--elastic-timeout has no meaning here"),
        (["-np", "2", "--hang-timeout", "4"], "--hang-timeout has no meaning here"),
        (["-np", "2", "--min-np", "1", "--hang-timeout", "-1"], "--hang-timeout: '-1' is not a number of seconds"),
        (["-np", "2", "--blacklist-cooldown-range", "1", "2"], "--blacklist-cooldown-range has no meaning here"),
        (
            ["-np", "2", "--on-failure", "restart", "--spares", "4"],
            "--spares has no meaning here: --on-failure restart starts all workers anew",
        ),
        (
            ["-np", "2", "--on-failure", "restart", "--host-discovery-script", "echo a"],
            "--on-failure restart starts a command anew on the hosts of -H or --hostfile that are left",
        ),
        (["--min-np", "1", "--slots", "2"], "--slots-per-host is for hosts that a --host-discovery-script prints"),
        (
            ["--min-np", "1", "-H", "a:2", "--host-discovery-script", "echo a"],
            "-H and --host-discovery-script both name the hosts: give only one of them",
        ),
        (["--min-np", "1", "--host-discovery-script", ""], "--host-discovery-script: '' is no command"),
        (
            ["--min-np", "1", "--blacklist-cooldown-range", "9", "3"],
            "--blacklist-cooldown-range 9 3: the first is the shortest time",
        ),
        (["--min-np", "1", "--reset-limit", "-1"], "--reset-limit: "),
        (["--m", "1"], "--m may be --metrics-textfile or --min-np or --min-num-proc or --max-np or"),
    ],
)
def test_what_cannot_be_is_one_line(words, message, capsys):
    assert hvdlite_run.main([*words, *([] if "--check" in words else ["true"])]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"hvdlite-run: {message}")


def test_a_script_that_may_not_be_executed_is_refused_before_anything_is_started(tmp_path, capsys):
    script = tmp_path / "hosts.sh"
    script.write_text("echo a:2")
    assert said(capsys, "--min-np", "1", "--host-discovery-script", str(script)) == (
        f"--host-discovery-script: {script} is not executable: chmod +x {script}"
    )


@pytest.mark.parametrize(
    ("words", "in_full"),
    [
        (["--slots", "2"], ["--slots", "2"]),
        (["--slots-per", "2"], ["--slots-per-host", "2"]),
        (["--host-disc=f", "-np", "2"], ["--host-discovery-script=f", "-np", "2"]),
        (["--num-p", "2"], ["--num-proc", "2"]),
        (["--min-n", "2"], ["--min-np", "2"]),
        (["--ssh-args", "--verb"], ["--ssh-args", "--verb"]),
        (["--bogus"], ["--bogus"]),
    ],
)
def test_long_flags_may_be_abbreviated_as_argparse_allows(words, in_full):
    assert Parser().split_command([*words, "cmd", "--min-n", "3"]) == (in_full, ["cmd", "--min-n", "3"])


def test_an_abbreviation_that_may_be_two_flags_is_refused():
    with pytest.raises(UsageError, match=r"^--ver may be --verbose or --version: write it in full$"):
        Parser().split_command(["--ver", "cmd"])


def test_a_config_file_says_the_same_as_the_flags(tmp_path, monkeypatch):
    file = tmp_path / "job.yaml"
    file.write_text(
        "min-np: 2\nmax_num_proc: 4\nslots: 2\nhost-discovery-script: echo a b\non-failure: shrink\n"
        "blacklist-cooldown-range: [10, 600]\nreset-limit: 3\nelastic-timeout: 60\nmax-restarts: 1\nspares: 0\n"
    )
    flags = [*("--min-np", "2", "--max-np", "4", "--slots", "2", "--host-discovery-script", "echo a b")]
    flags += ["--on-failure", "shrink", "--blacklist-cooldown-range", "10", "600", "--reset-limit", "3"]
    flags += ["--elastic-timeout", "60", "--max-restarts", "1", "--spares", "0"]
    parse = Parser().parse_args
    assert parse(config_words(str(file), Parser())) == parse(flags)


def test_survive_in_a_config_file_says_the_same_as_the_flag(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("np: 3\nmin-np: 1\nsurvive: true\nhang-timeout: 20\n")
    from_file = job("--config-file", str(file))
    assert from_file == job("-np", "3", "--min-np", "1", "--survive", "--hang-timeout", "20")
    assert from_file.environment.here["HVDLITE_SURVIVE"] == "1"
    file.write_text("np: 3\nmin-np: 1\nsurvive: false\n")
    assert job("--config-file", str(file)) == job("-np", "3", "--min-np", "1")


def test_hosts_on_the_command_line_replace_the_files_script(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("min-np: 1\nhost-discovery-script: echo a\n")
    assert job("--config-file", str(file), "-H", "localhost:2").elastic == ElasticSpec(Policy(min_np=1))
