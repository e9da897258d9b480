"""The text that --dry-run prints."""

import pytest
from hvdlite_launcher.cli import hvdlite_run
from hvdlite_launcher.plan.dry_run import dry_run
from hvdlite_launcher.plan.exported_variables import WorkerEnvironment
from hvdlite_launcher.plan.hosts import Host
from hvdlite_launcher.plan.job_spec import JobSpec
from hvdlite_launcher.plan.slots import plan_slots
from hvdlite_launcher.plan.worker_environment import HostEnvironment

SHARED_AND_FIRST = """\
all ranks
    HVDLITE_SIZE=3
    HOROVOD_SIZE=3
    WORLD_SIZE=3
    MASTER_ADDR=<the address of a>
    MASTER_PORT=<a free port of a>
    HVDLITE_STORE=unix:///tmp/hvdlite-<job>/store
    HVDLITE_JOB_DIR=/tmp/hvdlite-<job>
    OMP_NUM_THREADS=4
    PYTHONUNBUFFERED=1
    GLOO_ENABLE_STORE_V2_API=1
    GLOO_SOCKET_IFNAME=lan0
    NCCL_SOCKET_IFNAME==lan0
    PYTHONPATH=<the directory of hvdlite-run's sitecustomize on that host>, then its other value

rank 0 on a: local rank 0 of 2, cross rank 0 of 2
    HVDLITE_RANK=0
    HVDLITE_LOCAL_RANK=0
    HVDLITE_LOCAL_SIZE=2
    HVDLITE_CROSS_RANK=0
    HVDLITE_CROSS_SIZE=2
    HVDLITE_WORKER=0
    HVDLITE_HOST=a
    HOROVOD_RANK=0
    HOROVOD_LOCAL_RANK=0
    HOROVOD_LOCAL_SIZE=2
    HOROVOD_CROSS_RANK=0
    HOROVOD_CROSS_SIZE=2
    HOROVOD_HOSTNAME=a
    RANK=0
    LOCAL_RANK=0
    LOCAL_WORLD_SIZE=2
    GROUP_RANK=0

"""


def _preview(given, *hosts, facts=lambda _: HostEnvironment("/tmp/hvdlite-<job>", 8, "lan0", 2, is_alone=False)):
    job = JobSpec(hosts, None, (), "/", WorkerEnvironment(given, given), 1, 1)
    return dry_run(job, plan_slots(hosts), {}, facts)


def test_what_only_a_host_knows_is_left_open():
    shown = _preview({}, Host("a", 2), Host("b", 1), facts=lambda _: None)
    assert "OMP_NUM_THREADS=<the host's cores / 2>" in shown
    assert "GLOO_SOCKET_IFNAME=<the interface towards the other hosts>" in shown


def test_what_all_ranks_share_is_shown_once_and_each_rank_with_its_place_and_its_own_variables():
    shown = _preview({}, Host("a", 2), Host("b", 1))
    assert shown.startswith(SHARED_AND_FIRST)
    places = [line for line in shown.splitlines() if line.startswith("rank")]
    assert places == [
        "rank 0 on a: local rank 0 of 2, cross rank 0 of 2",
        "rank 1 on a: local rank 1 of 2, cross rank 0 of 1",
        "rank 2 on b: local rank 0 of 1, cross rank 1 of 2",
    ]


def test_the_interface_that_the_user_wants_is_shown():
    hosts = (Host("a"), Host("b"))
    job = JobSpec(hosts, None, (), "/", WorkerEnvironment({}, {}), 1, 1, interfaces={"a": "eth1"})
    shown = dry_run(job, plan_slots(hosts), {})
    assert shown.count("GLOO_SOCKET_IFNAME=eth1") == 1


def test_what_flags_choose_for_all_workers_is_shown_once():
    hosts = (Host("a"), Host("b"))
    job = JobSpec(
        hosts, None, ("train",), "/", WorkerEnvironment({}, {}), 1, 1, interfaces={"": "eth0,eth1"}, as_horovod=True
    )
    shown = dry_run(job, plan_slots(hosts), {"HVDLITE_VERBOSE": "1"})
    assert shown.count("GLOO_SOCKET_IFNAME=<the first of eth0,eth1 that the host has>") == 1
    assert shown.count("HVDLITE_VERBOSE=1") == 1
    assert shown.count(", <the directory of hvdlite's horovod on that host>, then its other value") == 1


def test_the_command_and_its_directory_are_shown_once():
    def places(slots: int) -> list[str]:
        job = JobSpec((Host("a", slots),), None, ("python", "my train.py"), "/home/me", WorkerEnvironment({}, {}), 1, 1)
        return [line for line in dry_run(job, plan_slots(job.hosts), {}).splitlines() if line[:1].strip()]

    runs = "runs python 'my train.py' in /home/me"
    assert places(1) == [f"rank 0 on a: local rank 0 of 1, cross rank 0 of 1; {runs}"]
    ranks = [f"rank {rank} on a: local rank {rank} of 2, cross rank 0 of 1" for rank in (0, 1)]
    assert places(2) == [f"all ranks: {runs}", *ranks]


def test_what_the_user_has_set_is_not_shown():
    shown = _preview({"OMP_NUM_THREADS": "7", "API_KEY": "s3cret", "GLOO_SOCKET_IFNAME": "eth7"}, Host("a", 2))
    assert not any(word in shown for word in ("OMP_NUM_THREADS", "API_KEY", "s3cret", "GLOO_SOCKET_IFNAME", "eth7"))


def test_a_plan_can_be_seen_without_a_command(capsys):
    assert hvdlite_run.main(["--dry-run", "-H", "localhost:2"]) == 0
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("rank ")] == [
        f"rank {rank} on localhost: local rank {rank} of 2, cross rank 0 of 1" for rank in (0, 1)
    ]
    assert err == ""


def test_a_plan_that_cannot_be_is_as_wrong_as_without_a_dry_run(capsys):
    assert hvdlite_run.main(["--dry-run", "-H", "localhost:2", "-np", "3"]) == 2
    assert "more than the 2 slots" in capsys.readouterr().err


def _shown(capsys, *words: str) -> str:
    assert hvdlite_run.main(["--dry-run", *words, "python", "train.py"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_of_an_elastic_job_its_rules_its_hosts_and_its_first_workers_are_shown(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["-np", "2", "--min-np", "1", "--max-np", "2", "--spares", "1", "-H", "localhost:4"]
    rules, shared, *workers = _shown(capsys, *words).split("\n\n")
    assert rules.splitlines() == [
        "elastic job: 2 or more ranks at the beginning, 1 or more later, with 2 at most; "
        "1 besides wait for a place (--spares)",
        "hosts: localhost:4",
        "after a failure: a new worker takes the slot (--on-failure replace), 3 times within 300 s at most "
        "(--max-restarts)",
    ]
    assert [worker.splitlines()[0] for worker in workers] == [
        f"worker {number} on localhost: local rank {number}" for number in range(3)
    ]
    assert shared.startswith(f"all workers: runs python train.py in {tmp_path}\n")
    assert all(f"    HVDLITE_WORKER={number}\n" in worker for number, worker in enumerate(workers))
    assert not any(word in worker for worker in workers for word in ("HVDLITE_RANK", "SIZE=", "MASTER_"))


def test_hosts_of_an_elastic_job_are_those_that_its_script_prints_now(capsys):
    shown = _shown(capsys, "--min-np", "3", "--host-discovery-script", "echo a:2; echo localhost:1")
    assert "\nhosts: a:2, localhost:1 (what --host-discovery-script prints now)\n" in shown
    assert [line.partition(";")[0] for line in shown.splitlines() if line.startswith("worker ")] == [
        "worker 0 on a: local rank 0",
        "worker 1 on a: local rank 1",
        "worker 2 on localhost: local rank 0",
    ]
    # More hosts may come, so that no worker is reached by loopback alone.
    assert shown.count("GLOO_SOCKET_IFNAME=<the interface towards the other hosts>") == 1


def test_an_elastic_job_that_would_wait_for_hosts_is_shown_to_wait(capsys):
    shown = _shown(capsys, "--min-np", "3", "--host-discovery-script", "echo a:2")
    assert shown.endswith(
        "\ntoo few slots to begin: waits for hosts for 600 s (--elastic-timeout), and starts no worker before\n"
    )


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["shrink"], "the others go on, and the slot stays empty (--on-failure shrink)"),
        (["stop"], "the job ends (--on-failure stop)"),
        (["blacklist"], "its host gets no workers any more (--on-failure blacklist)"),
        (
            ["blacklist", "--blacklist-cooldown-range", "10", "600"],
            "its host gets no workers for 10 s, which doubles up to 600 s (--on-failure blacklist)",
        ),
    ],
    ids=" ".join,
)
def test_what_follows_a_failure_is_shown(capsys, words, answer):
    assert f"\nafter a failure: {answer}\n" in _shown(capsys, "--min-np", "1", "--on-failure", *words)


def test_a_script_that_fails_is_as_wrong_as_without_a_dry_run(capsys):
    assert hvdlite_run.main(["--dry-run", "--min-np", "1", "--host-discovery-script", "exit 3"]) == 1
    assert capsys.readouterr().err == "hvdlite-run: --host-discovery-script exit 3: it ended with exit code 3\n"
