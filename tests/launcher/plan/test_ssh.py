"""The command that starts an agent over ssh, and the explanations of ssh's failures."""

import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hvdlite_launcher.errors import LauncherError
from hvdlite_launcher.plan.hosts import Host
from hvdlite_launcher.plan.ssh import Ssh, explain, why_not_there_yet

NODE = Host("node1", 2, "user")


@pytest.fixture
def fake_ssh(tmp_path):
    """Provides a function that makes a program called ssh, which prints a given configuration; it returns its path."""

    def make(configuration):
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{configuration}\nEND\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return str(program)

    return make


def test_what_the_users_configuration_does_not_say_is_set(fake_ssh):
    argv = Ssh(program=fake_ssh("stricthostkeychecking ask\nconnecttimeout none")).agent_argv(NODE, 60)
    assert "-oStrictHostKeyChecking=accept-new" in argv
    assert "-oConnectTimeout=15" in argv
    # No question is asked, no process stays behind, none of the user's ports is forwarded, and no other command runs.
    for option in ("BatchMode=yes", "ControlMaster=no", "ClearAllForwardings=yes", "RemoteCommand=none"):
        assert f"-o{option}" in argv


@pytest.mark.parametrize("end", ["exit 255", "kill $$"])
def test_where_ssh_cannot_say_what_is_configured_nothing_of_it_is_overridden(fake_ssh, end):
    program = fake_ssh("stricthostkeychecking ask\nconnecttimeout none")
    with open(program, "a") as file:
        file.write(end)
    argv = Ssh(program=program).agent_argv(NODE, 60)
    assert not any("StrictHostKeyChecking" in word or "ConnectTimeout" in word for word in argv)
    assert "-oStrictHostKeyChecking=yes" in Ssh(program=program, known_hosts=True).agent_argv(NODE, 60)


def test_an_ssh_that_does_not_end_is_given_up_with_what_it_has_started(fake_ssh, tmp_path):
    program = fake_ssh("")
    with open(program, "a") as file:
        file.write(f"sleep 600 & echo $! >{tmp_path}/pid; wait")
    with pytest.raises(LauncherError, match=r"ssh -G user@node1 took more than 1 s: .*--start-timeout"):
        Ssh(program=program).agent_argv(NODE, 1)
    pid = int((tmp_path / "pid").read_text())
    while Path(f"/proc/{pid}/stat").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.01)


def test_what_the_users_configuration_says_stands(fake_ssh):
    argv = Ssh(program=fake_ssh("stricthostkeychecking true\nconnecttimeout 3")).agent_argv(NODE, 60)
    assert not any("StrictHostKeyChecking" in word or "ConnectTimeout" in word for word in argv)


@pytest.mark.parametrize("configured", ["ask", "accept-new", "false"])
def test_a_host_must_be_known_if_the_user_says_so_whatever_the_configuration(fake_ssh, configured):
    ssh = Ssh(program=fake_ssh(f"stricthostkeychecking {configured}"), known_hosts=True, args=("-oPort=2222",))
    argv = ssh.agent_argv(NODE, 60)
    # Of several values ssh takes the first.
    assert [word for word in argv if "StrictHostKeyChecking" in word] == ["-oStrictHostKeyChecking=yes"]
    assert argv.index("-oStrictHostKeyChecking=yes") < argv.index("-oPort=2222")
    words = "No ED25519 host key is known for node1\nHost key verification failed."
    assert "and --known-hosts requires a known one: accept it with" in explain(NODE, ssh, 255, words)


def test_connecting_takes_no_longer_than_starting_may(fake_ssh):
    assert "-oConnectTimeout=5" in Ssh(program=fake_ssh("")).agent_argv(NODE, 5.5)


def test_port_key_and_further_words_come_before_the_host(fake_ssh):
    ssh = Ssh(port=2222, identity_file="/my key", args=("-J", "jump"), program=fake_ssh(""))
    argv = ssh.agent_argv(NODE, 60)
    host = argv.index("user@node1")
    assert argv[host - 7 : host] == ["-p", "2222", "-i", "/my key", "-J", "jump", "--"]
    assert len(argv) == host + 2


def test_nothing_after_the_two_dashes_is_an_option_for_ssh_whoever_wrote_them(fake_ssh):
    for args in ((), ("-4", "--")):
        argv = Ssh(args=args, program=fake_ssh("")).agent_argv(NODE, 60)
        assert argv[-3:-1] == ["--", "user@node1"]
        assert argv.count("--") == 1


def test_a_cut_link_is_noticed_within_15_seconds_before_the_agent_speaks_too(fake_ssh):
    argv = Ssh(program=fake_ssh("")).agent_argv(NODE, 60)
    options = dict(word[2:].split("=", 1) for word in argv if word.startswith("-o"))
    # ssh gives up one interval after the last probe.
    assert int(options["ServerAliveInterval"]) * (int(options["ServerAliveCountMax"]) + 1) < 15


def test_a_program_in_place_of_ssh_gets_a_host_and_a_command_and_no_option_of_ssh():
    argv = Ssh(program="/etc/mpi/kubexec.sh").agent_argv(Host("pod-1"), 60)
    assert argv[:2] == ["/etc/mpi/kubexec.sh", "pod-1"]
    assert len(argv) == 3


def _run_as_login_shell(command, shell="/bin/sh", **kwargs):
    return subprocess.run([shell, "-c", command], capture_output=True, check=False, timeout=100, **kwargs)


def test_the_first_interpreter_that_exists_is_taken_whatever_its_name_holds(tmp_path):
    python = tmp_path / 'it\'s a "python" $HOME'
    python.symlink_to(sys.executable)
    command = Ssh(program="no-ssh", remote_python=str(python)).agent_argv(NODE, 60)[-1]
    run = _run_as_login_shell(command.replace("-m hvdlite_launcher.host.remote_parent", "--version"), cwd=tmp_path)
    assert run.stdout.startswith(b"Python 3."), run


def test_an_interpreter_in_the_home_directory_is_found(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "py").symlink_to("/bin/echo")
    command = Ssh(program="no-ssh", remote_python="~/bin/py").agent_argv(NODE, 60)[-1]
    run = _run_as_login_shell(command, env={"HOME": str(tmp_path), "PATH": "/bin:/usr/bin"})
    assert run.stdout == b"-m hvdlite_launcher.host.remote_parent\n"


def test_an_interpreter_that_is_nowhere_is_told_by_the_word_for_it():
    command = Ssh(program="no-ssh", remote_python="/no/such/python").agent_argv(NODE, 60)[-1]
    run = _run_as_login_shell(command)
    assert (run.returncode, run.stderr) == (127, b"no such python: /no/such/python\n")
    assert "--remote-python" in explain(NODE, Ssh(), run.returncode, run.stderr.decode())


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ("user@node1: Permission denied (publickey).", "ssh-copy-id user@node1"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R node1"),
        ("No ED25519 host key is known for node1\nHost key verification failed.", "ssh user@node1 true"),
        ("ssh: Could not resolve hostname node1: Name or service not known", "/etc/hosts"),
        ("ssh: connect to host node1 port 22: Connection refused", "-p sets another port"),
        ("ssh: connect to host node1 port 22: Connection timed out", "is the host up, and reachable from here?"),
        ("ssh: connect to host node1 port 22: No route to host", "is the host up, and reachable from here?"),
        ("/usr/bin/python3: No module named hvdlite_launcher", "pip install"),
        ("ModuleNotFoundError: No module named 'hvdlite_launcher.host'", "its hvdlite is another version"),
        ("ModuleNotFoundError: No module named 'psutil'", "pip install"),
        ("Fatal Python error: init_fs_encoding: failed to get the Python codec\n\n<no Python frame>", "PYTHONHOME"),
        ("kex_exchange_identification: Connection closed by remote host", "see its log"),
    ],
)
def test_a_failure_is_told_in_sshs_words_with_the_next_step(words, step):
    told = explain(NODE, Ssh(), 255, f"Welcome to node1\n{words}\n")
    assert words.splitlines()[0].strip("@ ") in told or words.splitlines()[-1] in told
    assert step in told
    assert "\n" not in told


def test_any_other_failure_is_told_by_its_last_line_and_how_to_see_it_by_hand():
    ssh = Ssh(port=2222, identity_file="/my key", args=("-J", "jump"))
    told = explain(NODE, ssh, 3, "first\nsomething new\n\n")
    by_hand = "ssh -p 2222 -i '/my key' -J jump user@node1 true"
    assert told == f"something new (ssh ended with exit code 3: try {by_hand})"


@pytest.mark.parametrize(
    ("returncode", "cause"),
    [
        (-9, "the ssh client was killed by SIGKILL"),
        (137, "its hvdlite agent was killed by SIGKILL"),
        (255, "its hvdlite agent ended unexpectedly (ssh ended with exit code 255: try ssh user@node1 true)"),
    ],
)
def test_who_was_killed_is_told_and_not_what_ssh_says_of_every_new_host(returncode, cause):
    words = "Warning: Permanently added 'node1' (ED25519) to the list of known hosts.\r\n"
    assert explain(NODE, Ssh(), returncode, words) == cause


@pytest.mark.parametrize("words", ["bad " * 16_000, "a bad " * 16_000 + "\n" + "x\n" * 70])
def test_words_without_end_take_no_time_and_are_cut(words):
    began_s = time.thread_time()
    told = explain(NODE, Ssh(), 255, words)
    assert time.thread_time() - began_s < 0.5
    assert len(told) < 600


CLOSED = "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by UNKNOWN port 65535"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("ssh: connect to host n1 port 2222: Connection refused\r\n", "connection refused"),
        ("ssh: connect to host n1 port 22: No route to host", "no route to host"),
        ("ssh: connect to host n1 port 22: Connection timed out", "connection timed out"),
        (
            "ssh: Could not resolve hostname n1: Name or service not known",
            "its name is not known (Name or service not known)",
        ),
        (f"ssh: connect to host jump port 22: Connection refused\r\n{CLOSED}", "connection refused"),
        (
            f"channel 0: open failed: connect failed: Connection refused\r\nstdio forwarding failed\r\n{CLOSED}",
            "connection refused",
        ),
        (
            "debug1: Connecting to n1.\nssh: connect to host n1 port 22: Connection refused\ndebug1: bye",
            "connection refused",
        ),
    ],
)
def test_a_host_that_is_not_there_yet_is_known_by_sshs_own_words_and_its_exit_code(words, cause):
    assert why_not_there_yet(255, words) == cause
    assert why_not_there_yet(1, words) is None


@pytest.mark.parametrize(
    "words",
    [
        "",
        "root@n1: Permission denied (publickey).",
        "Host key verification failed.",
        "curl: (7) Failed to connect to n2 port 80: Connection refused",
        # After it was reached: the host's shell has written the first line, and sshd has closed the connection.
        "ssh: connect to host n2 port 22: Connection refused\nConnection to n1 closed by remote host.",
        CLOSED,
    ],
)
def test_any_other_failure_will_be_the_same_the_next_time(words):
    assert why_not_there_yet(255, words) is None
