"""The text that --dry-run prints."""

import os
import shlex

from hvdlite_launcher.cli import hvdlite_run
from hvdlite_launcher.plan.dry_run import dry_run
from hvdlite_launcher.plan.hosts import Host, plan_slots
from hvdlite_launcher.plan.job_spec import JobSpec
from hvdlite_launcher.plan.worker_environment import WorkerEnvironment

# Plans of one host and of several, of which only a host knows some values; of elastic jobs, and what follows a failure.
PLANS = """\
-H localhost:1 python 'my train.py'
-H localhost:2
-H a:2,b:1 --network-interface lan0,lan1 --horovod --verbose python train.py
-np 2 --min-np 1 --max-np 2 --spares 1 -H localhost:4 python train.py
--min-np 3 --host-discovery-script 'echo a:2; echo localhost:1' python train.py
--min-np 3 --host-discovery-script 'echo a:2' python train.py
--min-np 1 -H a --on-failure shrink python train.py
--min-np 1 -H a --on-failure stop python train.py
--min-np 1 -H a --on-failure blacklist python train.py
--min-np 1 -H a --on-failure blacklist --blacklist-cooldown-range 10 600 python train.py
"""


def test_plans_are_as_agreed(capsys, monkeypatch, golden):
    monkeypatch.chdir("/")
    for name in set(os.environ) - {"PATH"}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr("hvdlite_launcher.plan.dry_run.usable_cores", lambda: 8)
    monkeypatch.setattr("hvdlite_launcher.plan.dry_run.loopback_interface", lambda: "lo")
    shown = []
    for words in PLANS.splitlines():
        assert hvdlite_run.main(["--dry-run", *shlex.split(words)]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        shown.append(f"$ hvdlite-run --dry-run {words}\n{out}\n")
    golden("dry_run.txt", "".join(shown))


def test_the_interface_that_the_user_wants_is_shown():
    hosts = (Host("a"), Host("b"))
    job = JobSpec(hosts, None, (), "/", WorkerEnvironment({}, {}), 1, 1, interfaces={"a": "eth1"})
    shown = dry_run(job, plan_slots(hosts), {})
    assert shown.count("GLOO_SOCKET_IFNAME=eth1") == 1


def test_what_the_user_has_set_is_not_shown():
    given = {"OMP_NUM_THREADS": "7", "API_KEY": "s3cret", "GLOO_SOCKET_IFNAME": "eth7"}
    job = JobSpec((Host("a", 2, is_here=True),), None, (), "/", WorkerEnvironment(given, given), 1, 1)
    shown = dry_run(job, plan_slots(job.hosts), {})
    assert not any(word in shown for word in ("OMP_NUM_THREADS", "API_KEY", "s3cret", "GLOO_SOCKET_IFNAME", "eth7"))


def test_a_plan_that_cannot_be_is_as_wrong_as_without_a_dry_run(capsys):
    assert hvdlite_run.main(["--dry-run", "-H", "localhost:2", "-np", "3"]) == 2
    assert "more than the 2 slots" in capsys.readouterr().err


def test_a_script_that_fails_is_as_wrong_as_without_a_dry_run(capsys):
    assert hvdlite_run.main(["--dry-run", "--min-np", "1", "--host-discovery-script", "exit 3"]) == 1
    assert capsys.readouterr().err == "hvdlite-run: --host-discovery-script exit 3: it ended with exit code 3\n"
