"""What a worker's reporter tells hvdlite-run, however often it is asked and whatever the program has put into it."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
import time

import pytest
import torch
from hvdlite_wire.codec import decode
from hvdlite_wire.store_requests import StoreRequest
from hvdlite_wire.worker_status import OwnStatus, StepStatus

from hvdlite.runtime import hang_report, world
from hvdlite.runtime.hang_report import HangReporter


class Store:
    """Keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[object] = []

    def request(self, kind: StoreRequest, arguments: list[bytes]) -> None:
        self.requests.append(kind)


class Reporter:
    """A reporter in the current directory, of a process that has waited for 100 s."""

    def __init__(self, describe=lambda _: OwnStatus(steps={"optimizer 1": 4}), waited_s=lambda: 100.0) -> None:
        self.store = Store()
        self.reporter = HangReporter(
            ".",
            3,
            self.store,
            describe=describe,
            waited_s=waited_s,
            warn_after_s=60.0,
        )

    def ask(self, what: bytes = b"brief") -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(f"r{os.getpid()}")
            connection.sendall(what)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    def close(self) -> None:
        self.reporter.leave_to_parent()


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    # As in a program that uses the signal itself: the handler would stay in this process.
    monkeypatch.setattr(hang_report.signal, "getsignal", lambda _: signal.SIG_IGN)


def test_a_rank_that_is_asked_all_the_time_tells_all_the_same_that_it_has_waited_for_too_long(monkeypatch):
    monkeypatch.setattr(hang_report, "_LOOKS_EACH_S", 1.0)
    reporter = Reporter()
    try:
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            reporter.ask()
        # The time to look has passed before the first of these is answered, so it looks before it answers the second.
        reporter.ask()
        reporter.ask()
        assert reporter.store.requests == [StoreRequest.STALLED]
    finally:
        reporter.close()


def test_each_wait_that_takes_too_long_is_told_once(monkeypatch):
    monkeypatch.setattr(hang_report, "_LOOKS_EACH_S", 0.01)
    looks = iter([59.0, 60.0, 61.0, 62.0, 1.0, 70.0, 71.0])
    all_seen = threading.Event()

    def waited_s() -> float:
        found = next(looks, None)
        if found is None:
            all_seen.set()
            return 72.0
        return found

    reporter = Reporter(waited_s=waited_s)
    try:
        assert all_seen.wait(60)
        assert reporter.store.requests == [StoreRequest.STALLED] * 2
    finally:
        reporter.close()


def test_a_rank_that_could_open_no_file_for_a_moment_answers_afterwards(monkeypatch):
    monkeypatch.setattr(hang_report, "_LACKS_PAUSE_S", 0.0)
    failures = [errno.EMFILE, errno.ENFILE]

    class RunsOut(socket.socket):
        def accept(self):
            if failures:
                raise OSError(failures[-1], os.strerror(failures.pop()))
            return super().accept()

    with monkeypatch.context() as patch:
        patch.setattr(hang_report.socket, "socket", RunsOut)
        reporter = Reporter()
    try:
        assert decode(OwnStatus, reporter.ask()) == OwnStatus(3, {"optimizer 1": 4})
        assert failures == []
    finally:
        reporter.close()


@pytest.mark.parametrize("wrong", [torch.tensor(5), -1, 1.5])
def test_what_cannot_be_told_is_told_as_an_error_and_ends_neither_the_thread_nor_the_program(wrong):
    reporter = Reporter(lambda _: OwnStatus(samples=wrong))
    try:
        reporter.reporter.note_progress()
        with open("worker.3.progress", "rb") as file:
            assert reporter.ask() == reporter.ask() == file.read()
        answer = decode(OwnStatus, reporter.ask())
        assert answer.worker == 3
        assert "Error: " in answer.error
        in_full = decode(OwnStatus, reporter.ask(b"report"))
        assert "Error: " in in_full.error
        assert any(thread.is_main for thread in in_full.threads)
        reporter.reporter.forget_note()
        assert not os.path.exists("worker.3.progress")
    finally:
        reporter.close()


def test_an_optimizer_that_cannot_be_told_of_leaves_the_rest_of_the_report():
    wrong = StepStatus("optimizer 1", 4, "collecting", 2, -1)
    reporter = Reporter(lambda _: OwnStatus(steps={"optimizer 1": 4}, optimizers=(wrong,), addresses=("10.0.0.1",)))
    try:
        in_full = decode(OwnStatus, reporter.ask(b"report"))
    finally:
        reporter.close()
    assert (in_full.steps, in_full.optimizers, in_full.addresses) == ({"optimizer 1": 4}, (), ("10.0.0.1",))
    assert "Error: " in in_full.error


def test_samples_that_are_counted_by_a_tensor_are_told_as_a_number(monkeypatch):
    monkeypatch.setattr(world._process, "samples", None)
    world.note_samples(torch.tensor(5))
    world.note_samples(2)
    assert json.dumps(world.own_status(in_full=False).samples) == "7"
