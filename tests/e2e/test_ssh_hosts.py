"""Jobs over two and three hosts, each with a real sshd: what runs there, how it fails, and what must stay private."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import hvdlite_launcher.version
import psutil
import pytest
from e2e.conftest import PATIENCE_S, TEARDOWN_S, assert_clean, is_called, ready, wait_until
from hvdlite_launcher.protocol.channel import SILENCE_S

pytestmark = pytest.mark.slow

WHO = "echo $HVDLITE_RANK on $(uname -n)"
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"

# Two ranks or more average their ranks, for which they must communicate.
AVERAGE = """
import os, torch, hvdlite as hvd
hvd.init(timeout_s=60)
mean = hvd.allreduce(torch.tensor(float(hvd.rank())), name="rank").item()
print(f"{mean:.1f} on {os.uname().nodename} by {os.environ.get('GLOO_SOCKET_IFNAME')}")
"""

# Trains until the file in its first argument exists.
TRAIN_UNTIL = """
import os, sys, torch, hvdlite as hvd
hvd.init(timeout_s=60)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
step = 0
while not hvd.allreduce(torch.tensor(float(os.path.exists(sys.argv[1]))), name="over", op=hvd.Sum).item():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    step += 1
    if step == 3: print("ready", flush=True)
"""

# Keeps the sockets by which gloo has connected open until the file in the second argument exists.
HELD = """
import os, sys, time, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
class Held(c10d.ProcessGroupGloo):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        while not os.path.exists(sys.argv[2]): time.sleep(0.01)
c10d.ProcessGroupGloo = dist.ProcessGroupGloo = Held
"""

# A program without hvdlite. It ends by os._exit because, also under torchrun, PyTorch 2.13 sometimes aborts if the
# interpreter ends before a thread of gloo has dropped its last tensor (for hvdlite: `hvdlite.runtime.departure`).
DDP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.full((2, 3), float(dist.get_rank()))).square().mean().backward()
    optimizer.step()
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(every, weights)
print(len(every), all(torch.equal(other, weights) for other in every), flush=True)
dist.destroy_process_group()
os._exit(0)
"""


def program(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def succeeded(job):
    """Returns the lines of the job's output, sorted; asserts that the job succeeded."""
    code, out, err = job.ended()
    assert code == 0, err.decode()
    return sorted(out.decode().splitlines())


def failed(job, code=1):
    """Returns the job's stderr; asserts that it ended with this exit code."""
    returncode, _, err = job.ended()
    assert returncode == code, err.decode()
    assert "Traceback" not in err.decode()
    return err.decode()


# ---------------------------------------------------------------- the places


@pytest.mark.night
def test_a_machine_under_several_names_is_one_host(launch, make_lan):
    lan = make_lan("a", "b")
    words = ["-H", f"a:1,root@a:2,b:1,{lan.hosts[0].address}:1"]
    job = launch(*words, "sh", "-c", "echo $LOCAL_RANK of $LOCAL_WORLD_SIZE on $(uname -n)", on=lan.desk)
    code, out, err = job.ended()
    assert code == 0
    lines = sorted(line.partition(":")[2] for line in out.decode().splitlines())
    assert lines == ["0 of 1 on b", "0 of 4 on a", "1 of 4 on a", "2 of 4 on a", "3 of 4 on a"]
    assert f"their slots are added there: root@a, {lan.hosts[0].address}" in err.decode()


@pytest.mark.night
def test_the_launcher_s_own_machine_can_be_one_of_the_hosts(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    a = lan.hosts[0]
    for own_name in ("a", "localhost", a.address):
        lines = succeeded(launch("-H", f"{own_name}:1,b:1", *program(tmp_path, AVERAGE), on=a))
        assert lines == ["[0]<stdout>:0.5 on a by eth0", "[1]<stdout>:0.5 on b by eth0"]
    # This host is not reached over ssh.
    a.refuse_keys()
    lines = succeeded(launch("-H", "b:1,a:1", "sh", "-c", WHO, on=a))
    assert lines == ["[0]<stdout>:0 on b", "[1]<stdout>:1 on a"]


def test_a_command_and_an_environment_arrive_as_they_are(launch, make_lan):
    lan = make_lan("a", "b")
    hard = "a  b'c\"d$HOME`id`\\n\n*;|&é\t~ #!"
    env = {"HARD": hard, "API_KEY": "k", "DISPLAY": ":7", "XDG_RUNTIME_DIR": "/run/user/7", "SSH_AUTH_SOCK": "/none"}
    show = (
        "import os, sys; print([sys.argv[1:], *map(os.environ.get, "
        "['HARD', 'API_KEY', 'EXTRA', 'DISPLAY', 'XDG_RUNTIME_DIR', 'SSH_AUTH_SOCK', 'HOME', 'TMPDIR'])])"
    )
    words = [sys.executable, "-c", show, hard, "", "-x"]
    lines = succeeded(launch("-x", f"EXTRA={hard}", "-H", "a,b", *words, env=env, on=lan.desk))
    assert lines == [
        f"[{rank}]<stdout>:{[[hard, '', '-x'], hard, 'k', hard, None, None, None, str(host.home), str(host.tmp)]}"
        for rank, host in enumerate(lan.hosts)
    ]


@pytest.mark.night
def test_the_variable_pwd_is_the_working_directory_on_every_host(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    show = (sys.executable, "-c", "import os; print(os.environ['PWD'])")
    lines = succeeded(launch("-H", "a,b", *show, on=lan.hosts[0], cwd=tmp_path, env={"PWD": str(link)}))
    # Its own host keeps the path that the user typed.
    assert lines == [f"[0]<stdout>:{link}", f"[1]<stdout>:{tmp_path}"]
    lines = succeeded(launch("-H", "a,b", *show, on=lan.hosts[0], cwd=tmp_path, env={"PWD": "/"}))
    assert lines == [f"[{rank}]<stdout>:{tmp_path}" for rank in (0, 1)]


# ------------------------------------------------------------------ trainings


def losses(lines):
    (result,) = [line for line in lines if "training loss" in line]
    return re.search(r"training loss (\S+), test loss (\S+) after", result).groups()


@pytest.mark.night
def test_digits_train_to_the_same_losses_on_one_two_and_three_hosts(launch, make_lan):
    lan = make_lan("a", "b", "c", interfaces=("lan0", "ens7", "enp0s31f6"), decoy=True)
    digits = [sys.executable, str(DIGITS), "--epochs", "2"]
    env = {"OMP_NUM_THREADS": "1"}
    alone = losses(succeeded(launch("-np", "3", *digits, env=env)))
    assert losses(succeeded(launch("-H", "a:2,b:1", *digits, env=env, on=lan.desk))) == alone
    assert losses(succeeded(launch("-H", "a,b,c", *digits, env=env, on=lan.desk))) == alone


@pytest.mark.night
def test_hosts_with_ipv6_alone_train(launch, make_lan, tmp_path):
    lan = make_lan("a", "b", interfaces=("lan0", "ens7"), ipv6=True)
    spec = ",".join(f"{host.spec}:1" for host in lan.hosts)
    lines = succeeded(launch("-H", spec, *program(tmp_path, AVERAGE), on=lan.desk))
    assert lines == ["[0]<stdout>:0.5 on a by lan0", "[1]<stdout>:0.5 on b by ens7"]


@pytest.mark.night
@pytest.mark.parametrize("ipv6", [False, True])
def test_a_program_of_torch_distributed_alone_runs_as_under_torchrun(launch, make_lan, tmp_path, ipv6):
    lan = make_lan("a", "b", interfaces=("lan0", "ens7"), ipv6=ipv6)
    spec = f"{lan.hosts[0].spec}:2,{lan.hosts[1].spec}:1"
    lines = succeeded(launch("-H", spec, *program(tmp_path, DDP), on=lan.desk))
    assert lines == [f"[{rank}]<stdout>:3 True" for rank in range(3)]
    if not ipv6:  # the same, on one machine
        assert succeeded(launch("-np", "3", *program(tmp_path, DDP))) == lines


def test_the_interface_can_be_named_for_each_host(launch, make_lan, tmp_path):
    lan = make_lan("a", "b", interfaces=("lan0", "ens7"))
    words = ["-H", "a,b", "--network-interface", "a=lan0,b=ens7", *program(tmp_path, AVERAGE)]
    assert succeeded(launch(*words, on=lan.desk)) == ["[0]<stdout>:0.5 on a by lan0", "[1]<stdout>:0.5 on b by ens7"]
    either = ("-H", "a,b", "--network-interfaces", "lan0,ens7", "sh", "-c", "echo $GLOO_SOCKET_IFNAME")
    assert succeeded(launch(*either, on=lan.desk)) == ["[0]<stdout>:lan0", "[1]<stdout>:ens7"]
    err = failed(launch("-H", "a,b", "--network-interface", "lan0", "true", on=lan.desk))
    assert re.search(r"^hvdlite-run: b: .*lan0.*ens7", err, re.MULTILINE), err


def test_an_interface_that_leads_to_no_other_host_is_refused(launch, make_lan):
    lan = make_lan("a", "b")
    err = failed(launch("-H", "a,b", "--network-interface", "lo", "true", on=lan.desk))
    assert re.search(r"^hvdlite-run: [ab]: lo does not reach the job's other hosts", err, re.MULTILINE), err


def test_a_firewall_that_rejects_connections_between_hosts_is_named_with_the_check(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    a, b = lan.hosts
    b.reject_connections_to(a.address)  # of two hosts, gloo connects from the one with the higher address
    program = tmp_path / "init.py"
    program.write_text("import hvdlite as hvd; hvd.init()\n")
    code, _, err = launch("-H", f"{b.spec}:1,{a.spec}:1", sys.executable, str(program), on=lan.desk).ended()
    assert code == 1
    assert (
        f"hvd.init() failed on rank 0: {b.address} could not open a TCP connection to another host of the job "
        f"({a.address}): no route to host. Does a firewall block TCP between these hosts, or has the rank there ended? "
        f"hvdlite-run --check -H {b.address},{a.address} shows which connections fail."
    ) in err.decode()
    assert_clean(lan)


@pytest.mark.night
def test_a_launcher_that_stood_still_for_too_long_says_so(launch, make_lan):
    lan = make_lan("a", "b")
    job = ready(launch("-H", "a,b", "sh", "-c", "echo ready; exec sleep 1000", on=lan.desk))
    launcher = job.launcher()
    launcher.suspend()
    wait_until(lambda: not any(host.runs("sleep") for host in lan.hosts))
    launcher.resume()
    job.process.send_signal(signal.SIGCONT)  # the process that started it on the machine stops together with it
    assert "no message from the launcher for" in failed(job)
    assert_clean(lan)


def test_nobody_listens_but_gloo_on_the_chosen_address(launch, make_lan, tmp_path):
    lan = make_lan("a", "b", interfaces=("lan0", "ens7"), decoy=True)
    over, shown, seen_all = tmp_path / "over", tmp_path / "shown", tmp_path / "seen all"
    sshd = [(machine.name, address) for machine in lan.machines for address in machine.listening_tcp()]
    seen = set()
    with shown.open("wb") as file:
        train = program(tmp_path, HELD + TRAIN_UNTIL)
        job = launch("-H", "a:2,b:1", *train, str(over), str(seen_all), on=lan.desk, stdout=file)
    a, b = lan.hosts
    ranks = {("a", a.address, "0"), ("a", a.address, "1"), ("b", b.address, "2")}
    while shown.read_text().count(":ready\n") < 3:  # from the start of the job on
        assert job.process.poll() is None, job.ended()
        seen |= {
            (machine.name, address.rpartition(":")[0], rank_of(pid))
            for machine in lan.machines
            for address, pid in machine.listening_tcp().items()
            if (machine.name, address) not in sshd
        }
        if seen >= ranks:
            seen_all.touch()
    over.touch()
    assert job.ended()[0] == 0
    assert seen == ranks


def rank_of(pid):
    """Returns the rank of a worker; None for any other process."""
    try:
        return psutil.Process(pid).environ().get("HVDLITE_RANK")
    except (psutil.Error, ValueError):
        return None


# -------------------------------------------------------------------- secrets


@pytest.mark.new_processes("it says of each process what is seen of it")
def test_nothing_of_the_environment_s_secrets_is_seen_but_by_the_workers(launch, make_lan):
    lan = make_lan("a", "b")
    secret, token = (f"secret-{uuid.uuid4()}" for _ in range(2))
    env = {"API_KEY": secret, "TOKEN": token}
    job = launch(
        "-x", "TOKEN", "--verbose", "-H", "a:2,b:1", "sh", "-c", "echo ready; exec sleep 1000", env=env, on=lan.desk
    )
    ready(job, 3)
    wait_until(lambda: sum(is_called(each, "sleep") for host in lan.hosts for each in host.processes()) == 3)
    holders = set()
    for pid in psutil.pids():
        try:
            process = Path(f"/proc/{pid}")
            assert not any(word in (process / "cmdline").read_bytes().decode() for word in (secret, token))
            if any(word in (process / "environ").read_text() for word in (secret, token)):
                holders.add(pid)
                assert process.stat().st_uid == os.getuid()
                assert (process / "environ").stat().st_mode & 0o077 == 0
        except OSError:
            continue
    on_hosts = {process.pid: process.name() for host in lan.hosts for process in host.processes()}
    assert [on_hosts[pid] for pid in holders if pid in on_hosts] == ["sleep"] * 3
    # All other holders are the job's own processes on the desk.
    ours = {process.pid for process in job.processes()}
    assert holders <= ours
    job.launcher().send_signal(signal.SIGTERM)
    _, out, err = job.ended()
    assert not any(word in text.decode() for word in (secret, token) for text in (out, err))


# ------------------------------------------------------------- how to get there


def test_an_alias_of_the_user_s_ssh_configuration_is_enough(launch, make_lan, tmp_path):
    lan = make_lan("a", "b", ports=(2222, 2200))
    a, b = lan.hosts
    key = tmp_path / "other_key"
    (lan.desk.home / ".ssh" / "id_ed25519").rename(key)
    (lan.desk.home / ".ssh" / "config").write_text(
        f"Host big\n  HostName {a.address}\n  Port 2222\n  User root\n  IdentityFile {key}\n"
        f"Host small\n  HostName {b.address}\n  Port 2200\n  IdentityFile {key}\n"
    )
    lines = succeeded(launch("-H", "big:2,root@small:1", *program(tmp_path, AVERAGE), on=lan.desk))
    assert lines == [f"[{rank}]<stdout>:1.0 on {host} by eth0" for rank, host in enumerate("aab")]


def test_port_key_and_further_words_for_ssh_can_be_given(launch, make_lan, tmp_path):
    lan = make_lan("a", ports=(2222,))
    key = tmp_path / "other_key"
    (lan.desk.home / ".ssh" / "id_ed25519").rename(key)
    there = ["[0]<stdout>:0 on a"]
    assert succeeded(launch("-p", "2222", "-i", str(key), "-H", "a", "sh", "-c", WHO, on=lan.desk)) == there
    words = f"-o Port=2222 -o IdentityFile={key}"
    assert succeeded(launch(f"--ssh-args={words}", "-H", "root@a", "sh", "-c", WHO, on=lan.desk)) == there


@pytest.mark.night
def test_another_program_can_take_ssh_s_place(launch, make_lan, tmp_path):
    lan = make_lan("a")
    instead = tmp_path / "kubexec"
    # Called with a host and a command for a shell on it.
    instead.write_text(
        '#!/bin/sh\necho "$1" >>"$0.log"\nhost=$1; shift\nexec ssh -oStrictHostKeyChecking=no "$host" "$@"\n'
    )
    instead.chmod(0o755)
    lines = succeeded(launch("--ssh-program", str(instead), "-H", "a:2", "sh", "-c", WHO, on=lan.desk))
    assert lines == ["[0]<stdout>:0 on a", "[1]<stdout>:1 on a"]
    assert (tmp_path / "kubexec.log").read_text() == "a\n"


def test_what_a_remote_shell_says_does_no_harm(launch, make_lan):
    lan = make_lan("a", "b")
    # bash reads this file for commands of sshd; a greeting in it breaks scp.
    noise = "echo Welcome to b; echo mind your step >&2; head -c 3000 /dev/urandom\n"
    (lan.hosts[1].home / ".bashrc").write_text(noise)
    assert succeeded(launch("-H", "a,b", "sh", "-c", WHO, on=lan.desk)) == ["[0]<stdout>:0 on a", "[1]<stdout>:1 on b"]


def test_a_login_that_ends_with_a_word_on_stdout_is_told_by_that_word(launch, make_lan):
    lan = make_lan("a", "b")
    (lan.hosts[1].home / ".bashrc").write_text("echo This account is closed.; exit 1\n")
    assert "b: This account is closed. (ssh ended with exit code 1" in failed(launch("-H", "a,b", "true", on=lan.desk))


# ------------------------------------------------------------ who is not there


def test_a_host_that_refuses_the_key_is_named_with_ssh_s_words_and_the_next_step(launch, make_lan, tmp_path):
    lan = make_lan("a", "b", "c")
    lan.hosts[1].refuse_keys()
    started = tmp_path / "started"
    err = failed(launch("-H", "a,b,c", "touch", str(started), on=lan.desk))
    assert re.search(r"^hvdlite-run: b: root@b: Permission denied \(publickey\)\..*ssh-copy-id b", err, re.MULTILINE), (
        err
    )
    assert not started.exists()
    assert_clean(lan)


def test_all_hosts_that_fail_are_told_each_with_its_own_cause(launch, make_lan):
    lan = make_lan("a", "b", "c")
    a, b, _ = lan.hosts
    a.refuse_keys()
    lan.cut(b)
    err = failed(launch("--start-timeout", "20", "-H", "a,b,c,nowhere", "true", on=lan.desk))
    for pattern in (
        r"^hvdlite-run: a: .*Permission denied.*ssh-copy-id a",
        r"^hvdlite-run: b: .*(timed out|[Nn]o route to host|no answer within 20 s)",
        r"^hvdlite-run: nowhere: .*Could not resolve hostname nowhere",
        r"^hvdlite-run: no worker was started, .*; c answered$",
    ):
        assert re.search(pattern, err, re.MULTILINE), f"{pattern}\n{err}"
    assert_clean(lan)


def test_a_host_that_accepts_connections_and_says_nothing_is_named_in_time(launch, make_lan):
    lan = make_lan("a", "b")
    lan.hosts[1].stop_answering()
    err = failed(launch("--start-timeout", "3", "-H", "a,b", "true", on=lan.desk))
    assert re.search(r"^hvdlite-run: b: .*(timed out|no answer within 3 s)", err, re.MULTILINE), err
    assert_clean(lan)


def test_a_port_where_nobody_listens_is_told(launch, make_lan):
    lan = make_lan("a", "b", ports=(22, 2222))
    err = failed(launch("--start-timeout", "15", "-H", "a,b", "true", on=lan.desk))
    assert re.search(r"^hvdlite-run: b: .*Connection refused.*-p.*--start-timeout", err, re.MULTILINE), err
    assert err.count("waiting for b: connection refused") == 1, err


def test_a_host_whose_key_has_changed_is_not_trusted(launch, make_lan):
    lan = make_lan("a")
    (a,) = lan.hosts
    assert succeeded(launch("-H", "a", "sh", "-c", WHO, on=lan.desk)) == ["[0]<stdout>:0 on a"]
    a.change_host_key()
    err = failed(launch("-H", "a", "true", on=lan.desk))
    assert "ssh-keygen -R a" in err
    assert len(err.splitlines()) == 1, err


def test_a_user_who_wants_host_keys_to_be_known_is_obeyed(launch, make_lan):
    lan = make_lan("a")
    (lan.desk.home / ".ssh" / "config").write_text("StrictHostKeyChecking yes\n")
    err = failed(launch("-H", "a", "true", on=lan.desk))
    assert re.search(r"^hvdlite-run: a: .*Host key verification failed", err), err
    assert not (lan.desk.home / ".ssh" / "known_hosts").exists()


def test_with_known_hosts_a_host_that_a_script_adds_is_refused_and_the_job_goes_on(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    assert succeeded(launch("-H", "a", "true", on=lan.desk)) == []  # its key is known from here on
    (tmp_path / "hosts").write_text("a\n")
    flags = ["--known-hosts", "--min-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {tmp_path}/hosts"]
    said = tmp_path / "said"
    with said.open("wb") as stderr:
        arguments = [sys.executable, "-c", TRAIN_UNTIL, str(tmp_path / "over")]
        job = ready(launch(*flags, *arguments, on=lan.desk, stderr=stderr), 1)
    (tmp_path / "hosts").write_text("a\nb\n")
    refused = re.compile(r"b: .*Host key verification failed.* --known-hosts requires a known one")
    wait_until(lambda: refused.search(said.read_text()), message=said.read_text)
    (tmp_path / "over").touch()
    assert job.ended()[0] == 0, said.read_text()


@pytest.mark.new_processes("a host lacks a part of what starts an agent")
def test_a_host_without_hvdlite_is_named_with_what_to_do(launch, make_lan):
    lan = make_lan("a", "b")
    lan.hosts[1].hide(Path(hvdlite_launcher.__file__).parent)
    err = failed(launch("-H", "a,b", "true", on=lan.desk))
    assert re.search(r"^hvdlite-run: b: .*the Python found there has no hvdlite.*--remote-python", err, re.MULTILINE), (
        err
    )


@pytest.mark.new_processes("a host lacks a part of what starts an agent")
def test_a_host_with_another_version_is_named_with_both(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    own = Path(hvdlite_launcher.__file__).parent
    older = tmp_path / "older"
    shutil.copytree(own, older)
    (older / "version.py").write_text('VERSION = "0.0.9"\n')
    lan.hosts[1].replace(own, older)
    err = failed(launch("-H", "a,b", "true", on=lan.desk))
    version = hvdlite_launcher.version.VERSION
    assert re.search(rf"^hvdlite-run: b: .*version {version} here, but 0\.0\.9 there", err, re.MULTILINE), err


def test_a_python_that_is_not_there_is_named(launch, make_lan):
    lan = make_lan("a")
    err = failed(launch("--remote-python", "/no/such/python", "-H", "a", "true", on=lan.desk))
    assert re.search(r"^hvdlite-run: a: .*/no/such/python.*--remote-python", err), err


def test_a_working_directory_that_a_host_lacks_is_named(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    here = tmp_path / "parent" / "here"
    here.mkdir(parents=True)
    lan.hosts[1].hide(here.parent)
    job = launch("-H", "a,b", "sleep", "1000", on=lan.desk, cwd=here)
    err = failed(job)
    assert re.search(rf"^hvdlite-run: b: .*{here}", err, re.MULTILINE), err
    assert_clean(lan)


def test_a_program_that_a_host_lacks_is_named(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    there = tmp_path / "only-on-a" / "train"
    there.parent.mkdir()
    there.write_text("#!/bin/sh\nexec sleep 1000\n")
    there.chmod(0o755)
    lan.hosts[1].hide(there.parent)
    err = failed(launch("-H", "a,b", str(there), on=lan.desk), 127)
    assert re.search(rf"^hvdlite-run: b: .*{there}", err, re.MULTILINE), err
    assert_clean(lan)


# -------------------------------------------------------------- what passes


def test_standard_input_reaches_rank_0_on_another_host(launch, make_lan):
    lan = make_lan("a", "b")
    with launch("-H", "a,b", "wc", "-c", on=lan.desk, stdin=subprocess.PIPE).process as process:
        out, err = process.communicate(b"x" * 3_000_000, timeout=PATIENCE_S)
    assert process.returncode == 0, err.decode()
    assert sorted(out.splitlines()) == [b"[0]<stdout>:3000000", b"[1]<stdout>:0"]


@pytest.mark.night
def test_a_flood_of_output_from_all_hosts_is_complete(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    flood = "import sys; sys.stdout.writelines(f'{i}\\n' for i in range(200_000)); sys.stderr.write('done\\n')"
    shown = tmp_path / "shown"
    with shown.open("wb") as file:
        code, _, err = launch("-H", "a:2,b:1", sys.executable, "-c", flood, on=lan.desk, stdout=file).ended()
    assert code == 0, err.decode()
    counted = {0: 0, 1: 0, 2: 0}
    for line in shown.read_text().splitlines():
        rank, number = re.fullmatch(r"\[(\d)\]<stdout>:(\d+)", line).groups()
        assert int(number) == counted[int(rank)]
        counted[int(rank)] += 1
    assert set(counted.values()) == {200_000}
    assert err.count(b"<stderr>:done\n") == 3


@pytest.mark.night
def test_a_screen_that_stands_still_for_a_while_neither_ends_the_job_nor_loses_a_line(launch, make_lan):
    lan = make_lan("a", "b")
    flood = "import sys; sys.stdout.writelines(f'{i}\\n' for i in range(500_000))"
    job = launch("-H", "a,b", sys.executable, "-c", flood, on=lan.desk)
    first = os.read(job.process.stdout.fileno(), 1)
    time.sleep(SILENCE_S + 4)  # all pipes are full, and only beats show that both ends are alive
    code, out, err = job.ended()
    assert code == 0, err.decode()
    assert (first + out).count(b"\n") == 1_000_000
    assert_clean(lan)


def test_the_end_of_who_reads_the_output_ends_the_job_on_all_hosts(launch, make_lan):
    lan = make_lan("a", "b")
    job = launch("-H", "a,b", "yes", on=lan.desk)
    job.process.stdout.readline()
    job.process.stdout.close()
    assert_clean(lan)
    assert job.process.wait(PATIENCE_S) == 128 + signal.SIGPIPE


def test_ctrl_c_is_heard_while_hosts_are_still_waited_for(launch, make_lan):
    lan = make_lan("a", "b")
    lan.cut(lan.hosts[1])
    job = launch("--verbose", "-H", "a,b", "true", on=lan.desk)
    while b"a answers" not in (line := job.process.stderr.readline()):
        assert line
    job.launcher().send_signal(signal.SIGINT)
    assert_clean(lan)
    failed(job, 130)


@pytest.mark.night
def test_a_large_environment_and_a_long_command_arrive(launch, make_lan):
    lan = make_lan("a")
    env = {f"LARGE{i}": str(i) * 100_000 for i in range(8)}
    count = "import os, sys; print(len(sys.argv[1]), sum(len(v) for k, v in os.environ.items() if 'LARGE' in k))"
    job = launch("-H", "a", sys.executable, "-c", count, "x" * 100_000, env=env, on=lan.desk)
    assert succeeded(job) == ["[0]<stdout>:100000 800000"]


@pytest.mark.night
def test_ranks_of_one_host_elsewhere_meet(launch, make_lan, tmp_path):
    lan = make_lan("a", interfaces=("lan0",))
    lines = succeeded(launch("-H", "a:2", *program(tmp_path, AVERAGE), on=lan.desk))
    assert [line.partition(" by ")[0] for line in lines] == ["[0]<stdout>:0.5 on a", "[1]<stdout>:0.5 on a"]


def test_the_exit_code_and_the_last_words_of_a_worker_elsewhere_are_told(launch, make_lan):
    lan = make_lan("a", "b")
    fail = "[ $HVDLITE_RANK = 0 ] && exec sleep 1000; echo no more batteries >&2; exit 7"
    job = launch("-H", "a,b", "sh", "-c", fail, on=lan.desk)
    err = failed(job, 7)
    assert re.search(r"^hvdlite-run: rank 1 on b \(pid \d+\) failed first, with exit code 7\.", err, re.MULTILINE), err
    assert err.rstrip().endswith("no more batteries")


@pytest.mark.night
def test_two_jobs_on_the_same_hosts_do_not_touch_each_other(launch, make_lan, tmp_path):
    lan = make_lan("a", "b")
    over = tmp_path / "over"
    staying = launch("-H", "a,b", *program(tmp_path, TRAIN_UNTIL), str(over), on=lan.desk)
    leaving = launch("-H", "a,b", *program(tmp_path, TRAIN_UNTIL), "/never", on=lan.hosts[0])
    ready(staying, 2)
    ready(leaving, 2)
    (victim,) = [process for process in leaving.processes() if rank_of(process.pid) == "1"]
    victim.kill()
    assert leaving.ended()[0] == 137
    wait_until(lambda: leaving.processes() == [], TEARDOWN_S)
    assert staying.process.poll() is None
    over.touch()
    assert staying.ended()[0] == 0
    assert_clean(lan)


# Eight megabytes of gradients, four times, and then again with a flat all-reduce.
TWO_LEVELS = """
import torch, hvdlite as hvd
for options in {}, {"hierarchical": False}:
    hvd.init(timeout_s=60, **options)
    param = torch.nn.Parameter(torch.zeros(2_000_003))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("weight", param)])
    sent = lambda: int(open("/proc/net/dev").read().partition("eth")[2].partition(":")[2].split()[8])
    hvd.barrier()
    before = sent()
    for step in range(4):
        optimizer.zero_grad()
        (param * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
    hvd.barrier()
    assert param.unique().tolist() == [-4 * 2.5]
    if hvd.local_rank() == 0:
        print("times the gradients:", (sent() - before) / (4 * 4 * param.numel()))
    hvd.shutdown()
"""


def test_a_host_with_two_ranks_sends_what_one_rank_would(launch, make_lan):
    lan = make_lan("a", "b")
    code, out, err = launch("-H", "a:2,b:2", sys.executable, "-c", TWO_LEVELS, on=lan.desk).ended()
    assert code == 0, err.decode()
    told = sorted(float(times) for times in re.findall(rb"times the gradients: (\S+)", out))
    assert len(told) == 4
    # In a ring of all ranks, each edge carries half as much again; packet headers are added to both.
    assert all(1.0 <= times < 1.2 for times in told[:2])
    assert all(1.5 <= times < 1.8 for times in told[2:])
    assert_clean(lan)
