"""The socket of a running hvdlite-run, and the client that asks on it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable

import pytest
from hvdlite_launcher.errors import JobEndsError, LauncherError, UsageError
from hvdlite_launcher.status import console
from hvdlite_launcher.status.console import Console, ask_for_report, ask_for_view, running_jobs, table_of_jobs

OWN = str(os.getpid())


def about():
    return {"started_at": time.time() - 3725, "workers": 3, "hosts": ["a", "b"], "command": ["python", "my train.py"]}


def test_who_asks_gets_the_report_that_the_event_is_answered_with():
    with Console(lambda asked: asked.answer("text", {"report": 1}), about):
        assert os.getpid() in running_jobs()
        assert ask_for_report(OWN) == ("text", {"report": 1})
    assert os.getpid() not in running_jobs()


def test_several_may_ask_at_once():
    waiting = []
    both_ask = threading.Barrier(2)

    def answer_both(asked) -> None:
        waiting.append(asked)
        both_ask.wait(60)
        asked.answer("text", {})

    with Console(answer_both, about):
        found = []
        threads = [threading.Thread(target=lambda: found.append(ask_for_report(OWN))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [("text", {})] * 2


@pytest.mark.parametrize("job", ["train.py", "", "-1", "12345678901"])
def test_what_is_no_process_number_is_refused(job):
    with pytest.raises(UsageError, match="is not the number of a process"):
        ask_for_report(job)


def test_a_process_that_is_no_hvdlite_run_is_refused_with_those_that_run():
    with pytest.raises(UsageError, match=r"^--report: no hvdlite-run with the process number \d+ runs here; "):
        ask_for_report(OWN)
    with Console(lambda _: None, about), pytest.raises(UsageError, match=f"running: .*{OWN}"):
        ask_for_report("1")


def test_a_launcher_that_ends_before_it_answers_is_an_error():
    with socket.socket(socket.AF_UNIX) as ending:
        ending.bind(f"\0hvdlite-run-{OWN}")
        ending.listen()

        def end() -> None:
            ending.accept()[0].close()

        threading.Thread(target=end).start()
        with pytest.raises(LauncherError, match=f"hvdlite-run {OWN} gave no report: its job is ending"):
            ask_for_report(OWN)


def test_who_waits_for_an_answer_when_the_console_closes_is_told_at_once(monkeypatch):
    monkeypatch.setattr(console, "_PATIENCE_S", 600.0)
    is_asked = threading.Event()
    said = []

    def ask() -> None:
        with pytest.raises(JobEndsError, match="does not answer: its job is ending"):
            ask_for_view(OWN)
        said.append(True)

    with Console(lambda _: is_asked.set(), about):
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        assert is_asked.wait(60)
    thread.join(60)
    assert said == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_launcher_is_refused_by_the_one_who_asks_and_another_user_by_the_launcher():
    asked = []

    def ask_as_another() -> list[object]:
        try:
            ask_for_report(OWN)
        except LauncherError as error:
            said = str(error)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0hvdlite-run-{OWN}")
            with contextlib.suppress(OSError):
                stranger.sendall(b"report\n")
                return [said, running_jobs(), stranger.recv(1).decode()]
            return [said, running_jobs(), ""]

    with Console(asked.append, about):
        said, jobs, answer = as_another_user(ask_as_another)
    assert said == f"--report: process {OWN} is another user's"
    assert os.getpid() not in jobs
    assert answer == ""
    assert asked == []


def as_another_user(call: Callable[[], list[object]]) -> list[object]:
    """Returns what the call returns in a process of another user."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            os.setuid(65534)
            os.write(writes, json.dumps(call()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said: list[object] = json.loads(pipe.read())
    os.wait()
    return said


def test_another_users_connection_gets_no_thread(monkeypatch):
    served = []
    monkeypatch.setattr(Console, "_serve", lambda _, connection: (served.append(1), connection.close()))
    users = [os.geteuid() + 1] * 50 + [os.geteuid()]
    monkeypatch.setattr(console, "_user_of", lambda _: users.pop(0))
    with Console(lambda _: None, about):
        for _ in range(51):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(console._address(os.getpid()))
                assert connection.recv(1) == b""
    assert (served, users) == ([1], [])


def test_a_launcher_that_could_open_no_file_for_a_moment_answers_afterwards(monkeypatch):
    monkeypatch.setattr(console, "_LACKS_PAUSE_S", 0.0)
    failures = [errno.EMFILE] * 3

    class RunsOut(socket.socket):
        def accept(self):
            if failures:
                raise OSError(failures.pop(), "Too many open files")
            return super().accept()

    monkeypatch.setattr(console.socket, "socket", RunsOut)
    with Console(lambda asked: asked.answer("text", {}), about):
        assert ask_for_report(OWN) == ("text", {})
    assert not failures


def test_a_launcher_that_can_start_no_thread_closes_the_connection_and_answers_the_next(monkeypatch):
    with Console(lambda asked: asked.answer("text", {}), about):
        start = threading.Thread.start
        fails = [True]

        def start_later(thread: threading.Thread) -> None:
            if fails and thread.name == "console client":
                fails.pop()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_later)
        with pytest.raises(JobEndsError):
            ask_for_report(OWN)
        assert ask_for_report(OWN) == ("text", {})


def test_a_job_in_another_network_namespace_is_said_to_be_there(monkeypatch):
    monkeypatch.setattr(console, "elsewhere", lambda: [7, 4242])
    there = (
        r"hvdlite-run 4242 is in another network namespace, as of a container: ask in there .*nsenter --net=/proc/4242"
    )
    with pytest.raises(UsageError, match=f"^--report: {there}"):
        ask_for_report("4242")
    with pytest.raises(UsageError, match=r"^--watch: no hvdlite-run .*hvdlite-run 7, 4242 are in another network"):
        ask_for_view(OWN)
    assert table_of_jobs().splitlines()[-1].startswith("hvdlite-run 7, 4242 are in another network namespace")


def test_a_launcher_that_is_stopped_is_said_to_be(monkeypatch):
    monkeypatch.setattr(console, "_PATIENCE_S", 0.1)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(f"\0hvdlite-run-{OWN}")
        stopped.listen()
        with pytest.raises(LauncherError, match="gave no report: it is stopped, or very busy"):
            ask_for_report(OWN)


def test_jobs_are_listed_with_their_age_workers_hosts_and_command():
    with Console(lambda _: None, about):
        head, *rows = table_of_jobs().splitlines()
    assert head.split() == ["PID", "AGE", "WORKERS", "HOSTS", "COMMAND"]
    (row,) = [row for row in rows if row.startswith(f"{OWN} ")]
    assert re.fullmatch(rf"{OWN} +1:02:0\d +3 +a,b +python 'my train.py'", row)


def test_a_job_is_one_line_also_if_its_command_has_several():
    told = {**about(), "command": ["python", "-c", "\nimport t\x1b[2J\nt.run()"]}
    with Console(lambda _: None, lambda: told):
        (row,) = [row for row in table_of_jobs().splitlines() if row.startswith(f"{OWN} ")]
    assert row.endswith(r"python -c '\nimport t\x1b[2J\nt.run()'")


def test_a_launcher_that_does_not_answer_is_listed_as_such(monkeypatch):
    monkeypatch.setattr(console, "_ABOUT_PATIENCE_S", 0.1)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(f"\0hvdlite-run-{OWN}")
        stopped.listen()
        assert re.search(rf"(?m)^{OWN} .*\(does not answer: it is stopped, or very busy\)$", table_of_jobs())


def test_a_launcher_that_is_stopped_for_so_long_that_it_takes_no_more_questions_is_said_to_be():
    with contextlib.ExitStack() as sockets:
        stopped = sockets.enter_context(socket.socket(socket.AF_UNIX))
        stopped.bind(f"\0hvdlite-run-{OWN}")
        stopped.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = sockets.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(f"\0hvdlite-run-{OWN}")
        with pytest.raises(LauncherError, match=f"hvdlite-run {OWN} gave no report: it is stopped, or very busy"):
            ask_for_report(OWN)
        assert re.search(rf"(?m)^{OWN} .*\(does not answer: it is stopped, or very busy\)$", table_of_jobs())


def test_jobs_are_found_whatever_bytes_the_name_of_anothers_socket_has():
    with socket.socket(socket.AF_UNIX) as other, Console(lambda _: None, about):
        other.bind(b"\0\xff\xfe of %d" % os.getpid())
        assert os.getpid() in running_jobs()


def test_a_request_that_is_none_is_not_answered():
    asked = []
    with Console(asked.append, about), socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0hvdlite-run-{OWN}")
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert asked == []
