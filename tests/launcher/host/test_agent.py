"""What the agent keeps of the workers that it has started."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys

import pytest
from hvdlite_launcher.host.agent import Agent, HostJob
from hvdlite_launcher.host.worker_processes import Worker
from hvdlite_launcher.protocol.messages import Exited, Greet, InitDone, PeakMemory, Refused, StartJob
from hvdlite_launcher.system import job_directory, process_tree
from hvdlite_launcher.version import VERSION
from pidfds import has_pidfds_of_threads

JOB = {
    "token": "t",
    "command": ("./gone",),
    "in_python": False,
    "as_horovod": False,
    "slots": 2,
    "environment": {},
    "inherits": False,
    "peers": (),
    "workers": {},
}


@pytest.fixture
def make_agent():
    """Provides ``make_agent()``: an agent that no launcher talks to."""
    fds: list[int] = []

    def make() -> Agent:
        own = [fd for _ in range(3) for fd in os.pipe()]
        fds.extend(own)
        return Agent(*own[::2], report_directory=lambda _: None)

    yield make
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("after", [0, None], ids=["in an elastic job", "in another"])
def test_in_an_elastic_job_the_end_of_a_killed_worker_is_told_before_it_is_reaped(
    make_agent, tmp_path, monkeypatch, after
):
    agent, sent = make_agent(), []
    agent._channel.send = sent.append
    agent._job = HostJob(StartJob(**JOB, forks=False, cwd="/"), str(tmp_path))
    process = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.PIPE)
    agent._on_started(Worker(5, process, {"stdout": process.stdout}))
    agent._send_of_worker(InitDone(5, after))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    while agent._selector.get_map():  # the pipe, and the pidfds of threads
        for key, _ in agent._selector.select():
            key.data()
    told_early = [Exited(5, -9)] if after == 0 and has_pidfds_of_threads() else []
    assert sent[2:] == told_early
    reaped = process_tree.Reaped(process.pid, process.wait(), 700)
    monkeypatch.setattr(process_tree, "reap", lambda: ([reaped], False))
    monkeypatch.setattr(os, "read", lambda *_: b"")
    agent._read_signals()
    assert sent[2:] == ([*told_early, PeakMemory(5, 700)] if told_early else [Exited(5, -9, peak_memory=700)])
    assert not agent._selector.get_map()


@pytest.fixture
def start(make_agent, tmp_path):
    """Provides ``start(**changes)``: an agent with a job, and the messages that it has sent."""

    def make(**changes):
        agent, sent = make_agent(), []
        agent._channel.send = sent.append
        spec = StartJob(**{**JOB, "forks": True, "cwd": str(tmp_path), **changes})
        agent._job = HostJob(spec, str(tmp_path))
        return agent, sent

    return make


def test_a_worker_that_cannot_be_started_is_named(start, tmp_path):
    agent, sent = start()
    agent._start({7: {}, 8: {}})
    agent, sent_there = start(cwd=str(tmp_path / "removed"))
    agent._start({9: {}})
    assert sent == [Refused("./gone: command not found", 127, worker=7)]
    assert sent_there == [
        Refused(f"{tmp_path}/removed: the working directory does not exist on this host", 1, worker=9)
    ]


def test_a_host_whose_horovod_is_gone_keeps_its_workers_though_it_can_have_no_more(start, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    agent, sent = start(as_horovod=True)
    agent._forked_workers.is_ready = True
    agent._start_fork_server_soon()
    agent._start({7: {}})
    (refused,) = sent
    assert (refused.exit_code, refused.worker) == (1, 7)
    assert refused.why.startswith(f"--horovod: {sys.executable} has no hvdlite with a horovod module")


def test_a_worker_whose_process_cannot_set_itself_up_is_refused(start, monkeypatch):
    def fails():
        raise MemoryError

    monkeypatch.setattr(process_tree, "dying_with_parent", lambda: fails)
    agent, sent = start(command=("true",), environment={"PATH": os.environ["PATH"]})
    agent._start({7: {}})
    (refused,) = sent
    assert (refused.worker, refused.exit_code) == (7, 126)


def test_where_the_job_s_directory_cannot_be_made_the_place_is_named(start, tmp_path, monkeypatch):
    def make(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "boot")

    monkeypatch.setattr(job_directory, "temporary_directory", lambda: str(tmp_path))
    monkeypatch.setattr(job_directory, "make", make)
    agent, sent = start(token="0123456789abcdef-0")
    job, agent._job, agent._greeting = agent._job, None, Greet(VERSION, beats=False, count_slots=False, interface=None)
    agent._prepare(job.spec)
    agent._start({1: {}})  # which the launcher may have sent before it reads why
    why = "no space or no inodes left: see df and df -i"
    assert sent == [Refused(f"cannot create the job's directory in {tmp_path}, and a socket in it: {why}", 1)]
