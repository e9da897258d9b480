"""hvdlite-run with real processes: what it gives to workers, shows of their output, and returns."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e.conftest import wait_until
from hvdlite_launcher.plan.worker_environment import OWN_VARIABLES
from hvdlite_launcher.protocol.channel import SILENCE_S

pytestmark = pytest.mark.new_processes("what workers are started with, and which processes there are")

PRINT_ENVIRONMENT = "import os; print(dict(sorted(os.environ.items())))"


def test_each_line_says_which_rank_wrote_it_and_where(launch):
    code, out, err = launch("-np", "2", "sh", "-c", "echo out; echo err >&2").ended()
    assert code == 0
    assert sorted(out.splitlines()) == [b"[0]<stdout>:out", b"[1]<stdout>:out"]
    assert sorted(err.splitlines()) == [b"[0]<stderr>:err", b"[1]<stderr>:err"]


def test_the_exit_code_is_that_of_the_first_failure_and_its_traceback_comes_last(launch):
    program = (
        "import os, signal, sys\n"
        "if os.environ['HVDLITE_RANK'] == '0': print('waits', file=sys.stderr); signal.pause()\n"
        "class Wrong(Exception): pass\n"
        "sys.excepthook = lambda *e: (sys.__excepthook__(*e), os._exit(3))\n"
        "raise Wrong('on purpose')"
    )
    code, _, err = launch("-np", "2", sys.executable, "-c", program).ended()
    assert code == 3
    first, *traceback = err.decode().partition("hvdlite-run: ")[2].splitlines()
    assert re.fullmatch(
        r"rank 1 on localhost \(pid \d+\) failed first, with exit code 3\. The end of its stderr:", first
    )
    assert traceback[0] == "    Traceback (most recent call last):"
    assert traceback[-1].endswith("Wrong: on purpose")


def test_a_traceback_of_several_ranks_is_shown_once_and_in_the_file_of_each(launch, tmp_path):
    program = (
        "import os, time\n"
        "open(f'ready {os.environ[\"HVDLITE_RANK\"]}', 'w').close()\n"
        "while not os.path.exists('end'): time.sleep(0.02)\n"
        "raise ValueError('on purpose')"
    )
    (tmp_path / "train.py").write_text(program)
    job = launch("-np", "3", "--output-filename", "out", sys.executable, "train.py", cwd=tmp_path)
    wait_until(lambda: all((tmp_path / f"ready {rank}").exists() for rank in range(3)))
    agent, launcher = job.agent(), psutil.Process(job.process.pid)
    launcher.suspend()  # the launcher gets all tracebacks at once
    (tmp_path / "end").touch()
    wait_until(lambda: not agent.children())
    launcher.resume()
    code, _, err = job.ended()
    before, _, message = err.decode().partition("hvdlite-run: ")
    files = [(tmp_path / "out" / f"rank.{rank}" / "stderr").read_text() for rank in range(3)]
    assert code == 1
    assert before == "".join(f"[0-2]<stderr>:{line}\n" for line in files[0].splitlines())
    assert files == [files[0]] * 3
    assert message.partition("\n")[2] == "".join(f"    {line}\n" for line in files[0].splitlines())
    job.assert_gone()


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_of_ranks_that_end_alike_the_one_that_said_why_is_quoted_and_not_the_first_to_end(launch, stream, tmp_path):
    program = (
        "import os, sys, time\n"
        "rank = os.environ['HVDLITE_RANK']\n"
        f"if rank == '0': print('bad config', file=sys.{stream})\n"
        "open(f'ready {rank}', 'w').close()\n"
        "while not os.path.exists(f'end {rank}'): time.sleep(0.02)\n"
        "sys.exit(2)"
    )
    job = launch("-np", "2", sys.executable, "-c", program, cwd=tmp_path)
    wait_until(lambda: all((tmp_path / f"ready {rank}").exists() for rank in (0, 1)))
    agent, launcher = job.agent(), psutil.Process(job.process.pid)
    launcher.suspend()  # the launcher gets both ends at once, that of rank 1 first
    for rank in (1, 0):
        (tmp_path / f"end {rank}").touch()
        wait_until(lambda left=rank: len(agent.children()) == left)
    launcher.resume()
    code, _, err = job.ended()
    assert code == 2
    report = err.decode().partition("hvdlite-run: ")[2].splitlines()
    assert re.match(r"rank 1 on localhost \(pid \d+\) failed first, with exit code 2", report[0])
    assert re.search(rf"rank 0 on localhost \(pid \d+\) failed .*\. The end of its {stream}:$", report[0])
    assert report[1:] == ["    bad config"]
    job.assert_gone()


def test_death_by_a_signal_is_named_and_gives_128_more(launch):
    code, _, err = launch("-np", "2", "sh", "-c", "kill -SEGV $$").ended()
    assert code == 139
    assert b"killed by SIGSEGV" in err


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("pyhton", 127, "pyhton: command not found"),
        ("", 127, "'': command not found"),
        ("./train.py", 126, "./train.py: permission denied; did you mean: python ./train.py?"),
        ("train.py", 127, "train.py: command not found; did you mean: python train.py?"),
        ("./no-first-line", 126, "./no-first-line: is neither a program nor a script"),
        ("./no-interpreter", 126, "./no-interpreter: the interpreter in its first line was not found"),
        ("/", 126, "/: is a directory"),
    ],
)
def test_a_command_that_cannot_be_started_is_told_as_a_shell_would(launch, tmp_path, command, code, said):
    for name, text, mode in [
        ("train.py", "pass", 0o644),
        ("no-first-line", "echo", 0o755),
        ("no-interpreter", "#!/no/such", 0o755),
    ]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    job = launch("-np", "2", command, cwd=tmp_path)
    returned, out, err = job.ended()
    assert (returned, out) == (code, b"")
    assert err.decode().startswith(f"hvdlite-run: {said}")
    assert err.count(b"\n") == 1
    job.assert_gone()


def test_any_argument_reaches_a_worker_unchanged(launch):
    argument = b"two  spaces 'single' \"double\" $HOME `id` \\ * \xff\nnext line"
    code, out, _ = launch("-np", "1", sys.executable, "-c", "import sys; print(ascii(sys.argv[1]))", argument).ended()
    assert code == 0
    assert out.decode() == f"[0]<stdout>:{os.fsdecode(argument)!a}\n"


def test_a_worker_runs_in_the_directory_of_the_launcher(launch, tmp_path):
    _, out, _ = launch("-np", "1", "sh", "-c", "pwd", cwd=tmp_path).ended()
    assert out.decode() == f"[0]<stdout>:{tmp_path}\n"


def test_modules_in_the_users_directory_do_not_replace_those_of_python(launch, tmp_path):
    (tmp_path / "selectors.py").write_text("raise SystemExit('not this one')")
    # Not `python -m`, which itself searches the directory first.
    start = "import sys; sys.path.pop(0); from hvdlite_launcher.cli.hvdlite_run import main; sys.exit(main())"
    run = subprocess.run(
        [sys.executable, "-c", start, "-np", "1", "true"], cwd=tmp_path, capture_output=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, b"")


def _environments(launch, *flags, env=None):
    code, out, err = launch(*flags, sys.executable, "-c", PRINT_ENVIRONMENT, env=env).ended()
    assert code == 0, err
    return [eval(line.partition(b":")[2]) for line in sorted(out.splitlines())]


def test_each_worker_is_told_its_place_and_where_to_meet(launch):
    environments = _environments(launch, "-H", "127.0.0.1:3", "-np", "2")
    for rank, environment in enumerate(environments):
        job_dir = environment["HVDLITE_JOB_DIR"]
        assert {name: value for name, value in environment.items() if name.startswith("HVDLITE_")} == {
            "HVDLITE_RANK": str(rank),
            "HVDLITE_SIZE": "2",
            "HVDLITE_LOCAL_RANK": str(rank),
            "HVDLITE_LOCAL_SIZE": "2",
            "HVDLITE_CROSS_RANK": "0",
            "HVDLITE_CROSS_SIZE": "1",
            "HVDLITE_WORKER": str(rank),
            "HVDLITE_HOST": "127.0.0.1",
            "HVDLITE_STORE": f"unix://{job_dir}/store",
            "HVDLITE_JOB_DIR": job_dir,
            "HVDLITE_START_TIMEOUT": environment["HVDLITE_START_TIMEOUT"],  # of these tests, passed on as all are
        }
        loopback = psutil.net_if_addrs()[environment["GLOO_SOCKET_IFNAME"]]
        assert "127.0.0.1" in {address.address for address in loopback}
        assert environment["PYTHONUNBUFFERED"] == "1"


def test_the_jobs_directory_is_private_and_goes_with_the_job(launch):
    job = launch("-np", "1", "sh", "-c", 'stat -c %a "$HVDLITE_JOB_DIR"; touch "$HVDLITE_JOB_DIR/store"')
    _, out, _ = job.ended()
    assert out == b"[0]<stdout>:700\n"
    assert job.leftovers() == []


def test_a_hostfile_says_how_many_workers_there_are(launch, tmp_path):
    (tmp_path / "hosts").write_text("# this machine\nlocalhost slots=2 max-slots=4\n127.0.0.1:1\n")
    environments = _environments(launch, "-hostfile", str(tmp_path / "hosts"))
    assert [environment["HVDLITE_SIZE"] for environment in environments] == ["3"] * 3


@pytest.mark.slow
def test_a_config_file_stands_for_the_flags_in_it_and_the_command_line_has_the_last_word(launch, tmp_path):
    (tmp_path / "config.yaml").write_text("np: 3\nno-env: true\nenvironment: {A: no, B: '1', TEST_HVDLITE_MARK: }\n")
    flags = ("-x", "B=2", "--config-file", str(tmp_path / "config.yaml"), "-n", "2")
    for environment in _environments(launch, *flags, env={"API_KEY": "s3cret"}):
        assert (environment["HVDLITE_SIZE"], environment["A"], environment["B"]) == ("2", "no", "2")
        assert "API_KEY" not in environment


def test_workers_have_the_environment_of_the_launcher_and_what_is_added(launch):
    flags = ("-x", "ADDED=a=b c", "-xTHERE=new", "-np", "1")
    (environment,) = _environments(launch, *flags, env={"THERE": "old", "OTHER": "\udcff"})
    assert (environment["ADDED"], environment["THERE"], environment["OTHER"]) == ("a=b c", "new", "\udcff")


def test_without_the_environment_workers_have_what_is_named_and_what_starts_a_program(launch):
    flags = ("--no-env", "-x", "TEST_HVDLITE_MARK", "-x", "NAMED=1", "-np", "1")
    (environment,) = _environments(launch, *flags, env={"API_KEY": "s3cret"})
    assert environment["PATH"] == os.environ["PATH"]
    ours = OWN_VARIABLES | {"TEST_HVDLITE_MARK"}
    unless_set = {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "GLOO_ENABLE_STORE_V2_API", "GLOO_SOCKET_IFNAME"}
    needed = {"PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONHOME"}
    # Nothing of the environment's own.
    assert Path(environment.pop("PYTHONPATH")).parts[-2:] == ("host", "path")
    assert environment.keys() - ours - unless_set - needed == {"NAMED"} | (environment.keys() & {"LC_CTYPE"})


def test_a_dry_run_tells_what_a_job_then_sets_and_starts_nothing(launch, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("API_KEY", "s3cret")
    monkeypatch.setenv("HVDLITE_JOB_DIR", "/of/an/outer/job")
    ran = tmp_path / "ran"
    job = launch("--dry-run", "-np", "2", "touch", ran)
    code, out, err = job.ended()
    assert (code, err) == (0, b"")
    assert b"s3cret" not in out
    assert not ran.exists()
    assert job.leftovers() == []
    shared, *told = (
        dict(line.strip().split("=", 1) for line in each.splitlines()[1:]) for each in out.decode().split("\n\n")
    )
    for variables, environment in zip(
        [{**shared, **own} for own in told], _environments(launch, "-np", "2"), strict=True
    ):
        directory = re.escape(variables.pop("HVDLITE_JOB_DIR")).replace("tmp0", "tmp1").replace("<job>", "[0-9a-f]+-0")
        assert re.fullmatch(directory, environment["HVDLITE_JOB_DIR"])
        assert variables.pop("HVDLITE_STORE").startswith("unix://")
        assert variables.pop("MASTER_PORT") == "<a free port of localhost>"
        assert variables.pop("PYTHONPATH").startswith("<the directory of hvdlite-run's sitecustomize")
        assert variables.items() <= environment.items()
        assert {"HVDLITE_RANK", "HVDLITE_HOST", "OMP_NUM_THREADS"} <= variables.keys()


def test_a_reader_of_a_plan_may_go_away(launch):
    read_end, write_end = os.pipe()
    os.close(read_end)
    job = launch("--dry-run", "-np", "2", stdout=write_end)
    os.close(write_end)
    code, _, err = job.ended()
    assert (code, err) == (141, b"")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say which cores are usable")
def test_the_usable_cores_are_shared_out_unless_the_user_says_otherwise(launch, monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (alone,) = _environments(launch, "-np", "1")
    assert alone["OMP_NUM_THREADS"] == str(cores)
    (own,) = _environments(launch, "-np", "1", env={"OMP_NUM_THREADS": "7"})
    assert own["OMP_NUM_THREADS"] == "7"


def test_a_reader_that_goes_away_ends_the_job_without_a_word(launch):
    read_end, write_end = os.pipe()
    job = launch("-np", "2", "sh", "-c", "yes", stdout=write_end)
    os.close(write_end)
    assert os.read(read_end, 1) == b"["
    os.close(read_end)
    code, _, err = job.ended()
    assert (code, err) == (141, b"")
    job.assert_gone()


@pytest.mark.parametrize("closed", ["0", "1", "2", "1 2"])
def test_closed_standard_streams_harm_nobody(launch, closed):
    command = shlex.join([sys.executable, "-m", "hvdlite_launcher", "-np", "2", "sh", "-c", "echo shown; exit 4"])
    script = " ".join([command, *(f"{number}>&-" for number in closed.split())])
    run = subprocess.run(["sh", "-c", script], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    assert run.returncode == 4
    assert (b"<stdout>:shown" in run.stdout) == ("1" not in closed)
    assert (b"failed first, with exit code 4" in run.stderr) == ("2" not in closed)


@pytest.mark.night
@pytest.mark.slow
def test_a_flood_from_all_ranks_loses_no_line_and_tears_none(launch, tmp_path):
    lines = 100_000
    with open(tmp_path / "out", "wb") as out:
        code, _, _ = launch(
            "-np", "4", "sh", "-c", f"seq {lines}; exec seq {lines} >&2", stdout=out, stderr=out
        ).ended()
    assert code == 0
    seen = {(rank, stream): 0 for rank in range(4) for stream in ("stdout", "stderr")}
    for line in (tmp_path / "out").read_text().splitlines():
        rank, stream, number = re.fullmatch(r"\[(\d)\]<(\w+)>:(\d+)", line).groups()
        key = int(rank), stream
        assert int(number) == seen[key] + 1
        seen[key] += 1
    assert set(seen.values()) == {lines}


def test_what_a_worker_wrote_right_before_its_death_is_shown(launch):
    program = "head -c 60000 /dev/zero | tr '\\0' x; echo last; kill -9 $$"
    _, out, _ = launch("-np", "2", "sh", "-c", program).ended()
    assert b"[0]<stdout>:" + b"x" * 60000 + b"last\n" in out or b"[1]<stdout>:" + b"x" * 60000 + b"last\n" in out


def test_bytes_that_are_no_text_pass_unharmed(launch):
    everything = bytes(byte for byte in range(256) if byte not in b"\r\n")
    program = f"import os; os.write(1, {everything!r})"
    _, out, _ = launch("-np", "1", sys.executable, "-c", program).ended()
    assert out == b"[0]<stdout>:" + everything + b"\n"


@pytest.mark.parametrize("size", [1, 2])
def test_what_each_worker_wrote_is_in_its_files_byte_by_byte(launch, tmp_path, size):
    program = "printf 'rank %s\\r\\377 no end' $HVDLITE_RANK; echo err >&2"
    job = launch("--output-filename", "new/logs", "-np", str(size), "sh", "-c", program, cwd=tmp_path)
    code, out, _ = job.ended()
    assert code == 0
    assert out.count(b"<stdout>:") == 2 * size
    for rank in range(size):
        directory = tmp_path / "new" / "logs" / f"rank.{rank}"
        assert (directory / "stdout").read_bytes() == b"rank %d\r\xff no end" % rank
        assert (directory / "stderr").read_bytes() == b"err\n"


@pytest.mark.parametrize(
    ("how", "file", "why"),
    [
        ("flag", "nowhere/t.json", "no file can be made in {tmp}/nowhere (No such file or directory): create it first"),
        ("HVDLITE_TIMELINE", "file/t.json", "no file can be made in {tmp}/file (Not a directory): choose another"),
        ("HVDLITE_TIMELINE", "file/", "cannot make the directory {tmp}/file/: File exists"),
        ("HOROVOD_TIMELINE", "fifo", "'{tmp}/fifo' is not a regular file"),
    ],
)
def test_a_timeline_that_cannot_be_written_is_refused_before_anything_starts(launch, tmp_path, how, file, why):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    flags, env = (["--timeline-filename", file], {}) if how == "flag" else ([], {how: file})
    name = "HVDLITE_TIMELINE" if how == "flag" else how
    code, out, err = launch("-np", "2", *flags, "touch", "started", cwd=tmp_path, env=env).ended()
    assert (code, out, err.count(b"\n")) == (2, b"", 1)
    assert err.decode().startswith(f"hvdlite-run: --timeline-filename ({name}): ")
    assert why.format(tmp=tmp_path) in err.decode()
    assert not (tmp_path / "started").exists()


def test_a_disk_that_is_full_in_mid_job_is_told_and_the_job_goes_on(launch, tmp_path):
    (tmp_path / "rank.1").mkdir()
    (tmp_path / "rank.1" / "stdout").symlink_to("/dev/full")
    job = launch("--output-filename", tmp_path, "-np", "2", "sh", "-c", "echo x; echo y >&2")
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert sorted(out.splitlines()) == [b"[0]<stdout>:x", b"[1]<stdout>:x"]
    (told,) = [line for line in err.decode().splitlines() if line.startswith("hvdlite-run")]
    assert told.startswith(f"hvdlite-run: --output-filename: {tmp_path}/rank.1/stdout cannot be written any more")
    assert (tmp_path / "rank.1" / "stderr").read_text() == "y\n"
    job.assert_gone()


def test_lines_can_begin_with_the_time(launch):
    _, out, _ = launch("-prefix-timestamp", "-np", "1", "echo", "text").ended()
    assert re.fullmatch(rb"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:text\n", out)


def test_a_worker_may_close_its_streams(launch):
    code, out, _ = launch("-np", "2", "sh", "-c", "echo one; exec >&- 2>&-; exit 5").ended()
    assert code == 5
    assert b"<stdout>:one\n" in out


def test_a_child_that_holds_the_pipes_open_does_not_keep_the_job(launch):
    job = launch("-np", "2", "sh", "-c", "sleep 1000 & echo done")
    code, out, _ = job.ended()
    assert code == 0
    assert out.count(b"done") == 2
    job.assert_gone()


@pytest.mark.night
@pytest.mark.slow
def test_many_workers_at_once_all_start_and_end(launch):
    code, out, _ = launch("-np", "64", "sh", "-c", "echo $HVDLITE_RANK").ended()
    assert code == 0
    assert sorted(out.splitlines()) == sorted(b"[%d]<stdout>:%d" % (rank, rank) for rank in range(64))


def test_verbose_says_what_is_done_but_no_value_of_the_environment(launch):
    code, _, err = launch("--verbose", "-np", "2", "true", env={"API_KEY": "s3cret"}).ended()
    assert code == 0
    assert re.search(rb"hvdlite-run: rank 1: localhost, local rank 1 of 2\n", err)
    assert re.search(rb"hvdlite-run: rank 1 is pid \d+ on localhost\n", err)
    assert b"s3cret" not in err


@pytest.mark.slow
def test_a_host_may_take_longer_to_count_its_gpus_than_silence_may_last(launch, tmp_path):
    tools = {
        "nvidia-smi": f"#!/bin/sh\nsleep {SILENCE_S + 1}\necho 'GPU 0: one'; echo 'GPU 1: two'; echo 'GPU 2: three'\n",
        # Takes the place of ssh: the "other host" is this machine, with the program above.
        "reach": f'#!/bin/sh\nunset CUDA_VISIBLE_DEVICES\nPATH={tmp_path}:$PATH exec sh -c "$2"\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = launch("--ssh-program", str(tmp_path / "reach"), "-H", "far:auto", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert sorted(out.decode().splitlines()) == [f"[{rank}]<stdout>:{rank} of 3" for rank in range(3)]


def test_neither_command_nor_environment_is_on_the_agents_command_line(launch):
    job = launch("-np", "1", "sh", "-c", "echo started; exec sleep 1000")
    assert job.process.stdout.readline() == b"[0]<stdout>:started\n"
    for process in (job.remote_parent(), job.agent()):
        assert process.cmdline()[1:] == ["-m", "hvdlite_launcher.host.remote_parent"]
