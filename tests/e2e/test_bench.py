"""`python -m hvdlite.bench` as a user runs it, at the smallest sizes: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e.conftest import TEARDOWN_S, assert_clean, wait_until
from e2e.machines import why_there_are_none

from hvdlite.bench.namespaces import Hosts
from hvdlite.bench.training import WORKLOADS

pytestmark = [pytest.mark.slow, pytest.mark.new_processes("measures, and lists the processes of a job")]

BENCH = (sys.executable, "-m", "hvdlite.bench")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
PATIENCE_S = 400


@pytest.fixture
def bench(launch):
    """Provides ``bench("allreduce", "--rounds", 2)``, which returns exit code, stdout and stderr of 2 ranks."""

    def run(*words: object, size: int = 2) -> tuple[int, str, str]:
        copies = words[0] != "memory"  # a copy has in memory what the process has that it is a copy of
        job = launch("-np", str(size), *BENCH, *map(str, words), env=ENVIRONMENT, copies=copies)
        code, out, err = job.ended(PATIENCE_S)
        job.assert_gone()
        return code, out.decode(), err.decode()

    return run


def test_allreduce_compares_every_size_and_dtype_and_writes_what_it_shows(bench, tmp_path):
    pytest.importorskip("matplotlib")
    files = ("--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    code, out, err = bench("allreduce", "--sizes", "4,1K,1M", "--dtypes", "float32,float16", "--rounds", 2, *files)
    assert code == 0, err
    assert "Traceback" not in err
    found = json.loads((tmp_path / "a.json").read_text())
    assert {(row["bytes"], row["dtype"], row["what"], row["count"]) for row in found["rows"]} == {
        (nbytes, dtype, what, 2)
        for nbytes in (4, 1024, 2**20)
        for dtype in ("float32", "float16")
        for what in ("hvdlite resident", "hvdlite any", "hvdlite call", "gloo", "memcpy")
    }
    assert (found["ranks"], found["complete"], found["device"], found["skipped"]) == (2, True, "cpu", [])
    assert len(re.findall(r"^\[0\]<stdout>:.* hvdlite any ", out, re.MULTILINE)) == 6
    assert "[1]<stdout>" not in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert f"[0]<stderr>:hvdlite.bench: wrote {tmp_path}/a.png" in err.splitlines()


@pytest.mark.night
def test_step_compares_all_variants_and_leaves_out_what_is_not_there(bench, tmp_path):
    models = ("--models", "resnet-small", "--batch", 1)
    code, out, err = bench("step", *models, "--steps", 2, "--json", tmp_path / "s.json")
    assert code == 0, err
    found = json.loads((tmp_path / "s.json").read_text())
    variants = ("none", "per-parameter", "ddp", "ddp-view", "ddp-fp16", "hvdlite", "hvdlite-fp16", "hvdlite-bf16")
    assert {(row["model"], row["variant"]) for row in found["rows"]} == {
        ("resnet-small", variant) for variant in variants
    }
    assert all(row["times_none"] > 0 and row["times_ddp"] > 0 for row in found["rows"])
    assert "left out: horovod cannot be measured: Horovod is not installed" in out


@pytest.mark.night
def test_memory_finds_that_gradients_take_a_models_size_and_ddp_twice_that(bench, tmp_path):
    variants = ("--variants", "none,ddp,hvdlite")
    code, _, err = bench("memory", *variants, "--rounds", 1, "--batch", 2, "--json", tmp_path / "m.json")
    assert code == 0, err
    rows = {row["variant"]: row["in_models"] for row in json.loads((tmp_path / "m.json").read_text())["rows"]}
    assert 0.98 < rows["none"] < 1.1
    assert 1.9 < rows["ddp"] < 2.4
    assert 0.98 < rows["hvdlite"] < 2.4


@pytest.mark.night
def test_memory_finds_the_state_of_an_optimizer_once_where_ranks_share_it(bench, tmp_path):
    words = ("--variants", "ddp-view,ddp-zero,hvdlite,hvdlite-shard", "--optimizer", "adamw-fused")
    code, _, err = bench("memory", *words, "--rounds", 1, "--batch", 2, "--json", tmp_path / "m.json")
    assert code == 0, err
    rows = {row["variant"]: row["in_models"] for row in json.loads((tmp_path / "m.json").read_text())["rows"]}
    assert 0.8 < rows["ddp-view"] - rows["ddp-zero"] < 1.2
    assert 0.8 < rows["hvdlite"] - rows["hvdlite-shard"] < 1.2


@pytest.mark.night
def test_what_does_not_exist_ends_all_ranks_with_2_and_one_line_of_rank_0(bench):
    code, out, err = bench("allreduce", "--sizes", "4Q")
    assert (code, out) == (2, "")
    line = "[0]<stderr>:hvdlite.bench allreduce: --sizes: '4Q' is not a size, such as 64, 4K or 100M"
    assert [each for each in err.splitlines() if each.startswith("[")] == [line]
    code, _, err = bench("step", "--json", "/no/such/place.json")
    assert code == 2
    assert "hvdlite.bench step: --json: '/no/such/place.json' cannot be written: " in err
    code, _, err = bench("step", "--variants", "horovod")
    assert code == 2
    assert "hvdlite.bench step: --variants: horovod cannot be measured: Horovod is not installed" in err
    assert "Traceback" not in err


@pytest.mark.night
def test_a_size_that_does_not_fit_is_skipped_with_the_reason_and_the_rest_measured(bench):
    code, out, err = bench("allreduce", "--sizes", "64,100000G", "--rounds", 1)
    assert code == 0, err
    assert re.search(r"skipped: 1e\+05 GB float32: needs \S+ GB, and \S+ [KMG]B of memory are free on ", out), out
    assert "64 B  float32  hvdlite any" in out


def test_one_rank_needs_no_launcher(rank_server):
    def alone(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **ENVIRONMENT}
        return subprocess.run(
            [sys.executable, *rank_server.python(), *BENCH[1:], *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    done = alone("step", "--models", "resnet-small", "--batch", "1", "--variants", "none,ddp,hvdlite", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "a training step on 1 rank" in done.stdout
    assert done.stderr == ""
    done = alone("step", "--models", "vgg")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "hvdlite.bench step: --models: 'vgg' is not a model: choose from mlp, gpt, resnet-small, resnet50\n"
    )


SMALL = ("allreduce", "--sizes", 64, "--rounds", 1)


def ended_with_stdout_to(stdout: int, *words: object) -> tuple[int, str]:
    done = subprocess.run(
        [*BENCH, *map(str, words)], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
    )
    os.close(stdout)
    return done.returncode, done.stderr


def to_nobody() -> int:
    """Provides a pipe whose reader has closed it, as after `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.night
def test_where_nobody_reads_on_it_ends_quietly_and_the_files_are_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, err = ended_with_stdout_to(to_nobody(), *SMALL, "--json", "a.json")
    assert (code, err) == (0, f"hvdlite.bench: wrote {tmp_path}/a.json\n")
    assert json.loads((tmp_path / "a.json").read_text())["rows"]
    assert ended_with_stdout_to(to_nobody(), "--help") == (0, "")


@pytest.mark.night
def test_ranks_of_two_hosts_share_no_memory_and_are_measured_all_the_same(launch, make_lan):
    lan = make_lan("a", "b")
    words = ["allreduce", "--sizes", "64,1M", "--rounds", "1"]
    job = launch("-H", "a,b", *BENCH, *words, env=ENVIRONMENT, on=lan.desk)
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    rows = re.findall(r"^\[0\]<stdout>:(\S+ \S+)  float32  (\S+( \S+)?)  ", out.decode(), re.MULTILINE)
    assert {(size, what) for size, what, _ in rows} == {
        (size, what) for size in ("64 B", "1 MB") for what in ("hvdlite", "hvdlite call", "gloo", "memcpy")
    }
    assert_clean(lan)


@pytest.mark.night(but=1)
@pytest.mark.parametrize("to_ranks", [False, True], ids=["ctrl-c", "to the ranks alone"])
def test_ctrl_c_keeps_what_was_measured(launch, tmp_path, to_ranks):
    pytest.importorskip("tqdm")
    files = ("--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png"))
    # It would take hours.
    job = launch("-np", "2", *BENCH, "allreduce", "--sizes", "64", "--rounds", "1000000", *files, env=ENVIRONMENT)
    assert job.process.stderr is not None
    for line in job.process.stderr:
        if re.search(rb"64 B float32: .* [1-9]\d*/1000000", line):
            break
    if to_ranks:
        for worker in job.agent().children():
            worker.send_signal(signal.SIGINT)
    else:
        job.process.send_signal(signal.SIGINT)
    code, out, err = job.ended()
    assert code == 130, err.decode()
    assert b"Traceback" not in err
    assert b"64 B  float32  hvdlite any" in out
    assert b"interrupted: this was measured so far" in out
    found = json.loads((tmp_path / "a.json").read_text())
    assert not found["complete"]
    assert {row["what"] for row in found["rows"]} == {
        "hvdlite resident",
        "hvdlite any",
        "hvdlite call",
        "gloo",
        "memcpy",
    }
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    job.assert_gone()


@pytest.fixture
def links(tmp_path):
    """Provides ``links("--rates", "1gbit")``, which starts `bench links` of a small model, outside of any job."""
    if reason := why_there_are_none():
        pytest.skip(f"no hosts can be made here: {reason}")
    started = []

    def start(*words: object) -> psutil.Popen:
        flags = ("--model", "resnet-small", "--batch", "1", "--techniques", "none,int8", "--rates", "1gbit")
        process = psutil.Popen(
            [*BENCH, "links", *flags, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        for each in [*process.children(recursive=True), process] if process.is_running() else []:
            each.kill()


def test_links_counts_on_the_interface_that_int8_sends_a_quarter(links, tmp_path):
    interfaces = set(psutil.net_if_stats())
    process = links("--steps", 1, "--json", tmp_path / "l.json")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err.decode()
    found = json.loads((tmp_path / "l.json").read_text())
    sent = {row["technique"]: row["median_bytes"] for row in found["rows"]}
    model_bytes = 4 * sum(param.numel() for param in WORKLOADS["resnet-small"].build().parameters())
    assert 1 < sent["none"] / model_bytes < 1.1
    assert 0.24 < sent["int8"] / sent["none"] < 0.28
    assert (found["ranks"], found["hosts"], found["threads_per_rank"]) == (2, ["host0", "host1"], 1)
    assert re.search(r"^1gbit  int8 .* MB ", out.decode(), re.MULTILINE)
    assert set(psutil.net_if_stats()) == interfaces


@pytest.mark.night
def test_the_time_to_a_loss_counts_the_bytes_until_then(tmp_path):
    if reason := why_there_are_none():
        pytest.skip(f"no hosts can be made here: {reason}")
    tool = Path(__file__).parents[1] / "bench" / "time_to_loss.py"
    flags = ("--techniques", "none,int8", "--rates", "1gbit", "--loss", "1.5", "--json", tmp_path / "l.json")
    done = subprocess.run([sys.executable, tool, *flags], capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    rows = json.loads((tmp_path / "l.json").read_text())["rows"]
    assert [(row["technique"], row["reached"]) for row in rows] == [("none", True), ("int8", True)]
    none, int8 = rows
    for row in rows:
        assert row["losses"][-1] <= 1.5 < min(row["losses"][:-1])
        assert row["steps"] == 10 * len(row["losses"])
    assert 0.2 < int8["sent_bytes"] / int8["steps"] / (none["sent_bytes"] / none["steps"]) < 0.32
    assert re.search(r"^1gbit  int8 .* m?s .* MB$", done.stdout.decode(), re.MULTILINE)


@pytest.mark.night
def test_links_as_they_are_are_measured_between_the_hosts_of_a_job(launch, make_lan):
    lan = make_lan("a", "b")
    words = ["links", "--rates", "as-is", "--model", "resnet-small", "--batch", "1", "--steps", "1"]
    job = launch("-H", "a,b", *BENCH, *words, "--techniques", "ddp,bf16", env=ENVIRONMENT, on=lan.desk)
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    rows = re.findall(r"^\[0\]<stdout>:as-is  (\S+) +(\S+) MB ", out.decode(), re.MULTILINE)
    sent = {technique: float(megabytes) for technique, megabytes in rows}
    assert 0.48 < sent["bf16"] / sent["ddp"] < 0.55
    assert_clean(lan)


@pytest.mark.night(but=1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_links_that_is_ended_leaves_neither_hosts_nor_ranks(links, signum):
    process = links("--steps", 1000000)

    def are_there() -> bool:
        # Two hosts and the switch between them, and a rank on each host, once it has entered the host's network.
        children = process.children()
        try:
            networks = [os.readlink(f"/proc/{child.pid}/ns/net") for child in children]
        except OSError:  # a command that has done its work
            return False
        return len(children) == 5 and os.readlink("/proc/self/ns/net") not in networks and len(set(networks)) == 3

    wait_until(are_there, PATIENCE_S, lambda: f"{process.children()}")
    children = process.children(recursive=True)
    process.send_signal(signum)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum), err.decode()
    assert psutil.wait_procs(children, TEARDOWN_S)[1] == []


def test_a_rank_of_links_that_was_ended_before_the_rank_began_does_not_run(tmp_path, monkeypatch):
    if reason := why_there_are_none():
        pytest.skip(f"no hosts can be made here: {reason}")
    begin = ["touch", str(tmp_path / "begun")]
    hosts = Hosts(1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 2**30)  # not the process that starts the rank
            (late,) = hosts.start(begin, {})
        assert late.wait(PATIENCE_S) == 1
        assert not (tmp_path / "begun").exists()
        (timely,) = hosts.start(begin, {})
        assert timely.wait(PATIENCE_S) == 0
        assert (tmp_path / "begun").exists()
    finally:
        hosts.close()
