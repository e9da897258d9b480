"""The plan as text."""

from hvdlite_launcher.cli import hvdlite_run
from hvdlite_launcher.plan.dry_run import preview
from hvdlite_launcher.plan.exported_variables import Environment
from hvdlite_launcher.plan.hosts import Host
from hvdlite_launcher.plan.slots import plan_slots
from hvdlite_launcher.plan.worker_environment import HostEnvironment

FIRST = """\
rank 0 on a: local rank 0 of 2, cross rank 0 of 2
    HVDLITE_RANK=0
    HVDLITE_SIZE=3
    HVDLITE_LOCAL_RANK=0
    HVDLITE_LOCAL_SIZE=2
    HVDLITE_CROSS_RANK=0
    HVDLITE_CROSS_SIZE=2
    HVDLITE_HOST=a
    HOROVOD_RANK=0
    HOROVOD_SIZE=3
    HOROVOD_LOCAL_RANK=0
    HOROVOD_LOCAL_SIZE=2
    HOROVOD_CROSS_RANK=0
    HOROVOD_CROSS_SIZE=2
    HOROVOD_HOSTNAME=a
    RANK=0
    WORLD_SIZE=3
    LOCAL_RANK=0
    LOCAL_WORLD_SIZE=2
    GROUP_RANK=0
    MASTER_ADDR=<the address of a>
    MASTER_PORT=<a free port of a>
    HVDLITE_STORE=unix:///tmp/hvdlite-<job>/store
    HVDLITE_JOB_DIR=/tmp/hvdlite-<job>
    OMP_NUM_THREADS=4
    PYTHONUNBUFFERED=1
    GLOO_ENABLE_STORE_V2_API=1
    GLOO_SOCKET_IFNAME=lan0
    NCCL_SOCKET_IFNAME==lan0

"""


def _preview(given, *hosts, facts=lambda _: HostEnvironment("/tmp/hvdlite-<job>", 8, "lan0")):
    return preview(plan_slots(hosts), Environment(given, given), facts)


def test_what_only_a_host_knows_is_left_open():
    shown = _preview({}, Host("a", 2), Host("b", 1), facts=lambda _: None)
    assert "OMP_NUM_THREADS=<its cores / 2>" in shown
    assert "GLOO_SOCKET_IFNAME=<towards the others>" in shown


def test_each_rank_is_shown_with_its_place_and_the_variables_set_for_it():
    shown = _preview({}, Host("a", 2), Host("b", 1))
    assert shown.startswith(FIRST)
    places = [line for line in shown.splitlines() if line.startswith("rank")]
    assert places == [
        "rank 0 on a: local rank 0 of 2, cross rank 0 of 2",
        "rank 1 on a: local rank 1 of 2, cross rank 0 of 1",
        "rank 2 on b: local rank 0 of 1, cross rank 1 of 2",
    ]


def test_the_interface_that_the_user_wants_is_shown():
    slots = plan_slots((Host("a"), Host("b")))
    shown = preview(slots, Environment({}, {}), lambda _: None, lambda host: {"a": "eth1"}.get(host.name))
    assert shown.count("GLOO_SOCKET_IFNAME=eth1") == 1


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
