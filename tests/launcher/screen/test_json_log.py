"""The file of --log-json: one object per line, whatever workers write, and what happens where it cannot be written."""

import errno
import json
import os

import pytest
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.protocol.messages import Exited, InitDone, Interrupted, Lost, Output, Started
from hvdlite_launcher.screen import output_records
from hvdlite_launcher.screen.output_records import JsonLog, LogEvents
from hvdlite_launcher.workers.ending import Roster
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.json"


def _objects(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_of_a_stream_is_an_object_however_its_bytes_are_cut(path):
    log = JsonLog(str(path), clock=lambda: 12.5)
    for worker, stream, data in [(0, "stdout", b"on"), (1, "stderr", b"other\n"), (0, "stdout", b"e\ntwo\nthr")]:
        assert log.output(Output(worker, stream, data), worker + 10) is None
    log.finish(0)
    log.finish(0)
    log.close()
    assert _objects(path)[0] == {
        "time": 12.5, "kind": "output", "worker": 1, "rank": 11, "stream": "stderr", "text": "other"
    }  # fmt: skip
    assert [each["text"] for each in _objects(path)[1:]] == ["one", "two", "thr"]


def test_a_bar_is_its_last_state(path):
    log = JsonLog(str(path))
    log.output(Output(0, "stderr", b"\r10%\r20%"), 0)
    log.output(Output(0, "stderr", b"\r100%\r\nnext\r\n"), 0)
    assert [each["text"] for each in _objects(path)] == ["100%", "next"]


@given(data=st.binary(max_size=40).map(lambda data: data.replace(b"\r", b"").replace(b"\n", b"")))
def test_the_bytes_of_a_worker_can_be_had_back(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.json"
    JsonLog(str(path)).output(Output(0, "stdout", data + b"\n"), None)
    (line,) = _objects(path)
    assert line["text"].encode(errors="surrogateescape") == data


def test_a_line_without_end_is_written_in_pieces(path):
    log = JsonLog(str(path))
    for _ in range(40):
        log.output(Output(0, "stdout", b"x" * (1 << 16)), 0)
    log.finish(0)
    texts = [each["text"] for each in _objects(path)]
    assert len(texts) > 1
    assert sum(map(len, texts)) == 40 << 16


def test_events_name_the_worker_and_come_after_its_last_line(path):
    log, roster = JsonLog(str(path)), Roster()
    roster.add(3, "node1", 0)
    events = LogEvents(roster, log.event)
    events.on_event(Started(3, 77))
    log.output(Output(3, "stdout", b"last"), 0)
    for event in (InitDone(3), Exited(3, -9), Exited(99, 1), Lost("node1", "gone"), Interrupted(15)):
        events.on_event(event)
    objects = _objects(path)
    assert [each["kind"] for each in objects] == ["started", "connected", "output", "exited", "lost", "signal"]
    about = {"worker": 3, "rank": 0, "host": "node1"}
    assert objects[0].items() >= {**about, "pid": 77}.items()
    assert objects[3].items() >= {**about, "exit_code": 137, "peer_lost": False}.items()


def test_a_disk_that_is_full_is_told_once_and_the_log_ends():
    log = JsonLog("/dev/full")
    told = log.event("say", text="one")
    assert told is not None
    assert told.startswith("--log-json /dev/full: cannot be written any more: no space")
    assert told.endswith(". The job goes on without it")
    assert log.event("say", text="two") is None


def test_after_a_failure_nothing_that_workers_write_is_looked_at(monkeypatch):
    log = JsonLog("/dev/full")
    assert log.output(Output(0, "stdout", b"one\n"), 0) is not None
    monkeypatch.setattr(output_records, "_last_state", None)
    assert log.output(Output(0, "stdout", b"two\n"), 0) is None


def test_a_disk_that_is_full_at_the_end_of_a_worker_is_told_too():
    log = JsonLog("/dev/full")
    assert log.output(Output(0, "stdout", b"last, without an end"), 0) is None
    told = log.event("exited", worker=0, rank=0)
    assert told is not None
    assert told.startswith("--log-json /dev/full: cannot be written any more: no space")
    assert log.event("say", text="one") is None


def test_the_unfinished_line_of_a_rank_whose_end_nobody_has_seen_is_written_at_the_end(path):
    log = JsonLog(str(path))
    log.output(Output(7, "stderr", b"one\nlast words"), 2)
    assert log.close() is None
    assert [(each["text"], each["worker"], each["rank"]) for each in _objects(path)] == [
        ("one", 7, 2),
        ("last words", 7, 2),
    ]


def test_a_restarted_job_goes_on_in_the_same_file_and_a_new_one_replaces_it(path):
    for is_continued in (False, True):
        JsonLog(str(path), is_continued=is_continued).event("say", text="x")
    assert len(_objects(path)) == 2
    JsonLog(str(path)).event("say", text="x")
    assert len(_objects(path)) == 1


def test_a_restarted_job_begins_the_file_anew_if_it_was_removed(path):
    JsonLog(str(path)).event("say", text="x")
    path.unlink()
    JsonLog(str(path), is_continued=True).event("say", text="y")
    assert [each["text"] for each in _objects(path)] == ["y"]


def test_a_file_that_is_removed_while_the_job_runs_is_told_once(path):
    log = JsonLog(str(path))
    assert log.event("say", text="x") is None
    path.unlink()
    assert log.event("say", text="y") == (
        f"--log-json {path}: cannot be written any more: it was removed. The job goes on without it"
    )
    assert log.event("say", text="z") is None
    assert not path.exists()


def test_a_disk_on_a_network_that_is_full_when_the_file_is_closed_is_told(path, monkeypatch):
    closed = []

    def close(fd):
        closed.append(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = JsonLog(str(path))
    with monkeypatch.context() as patch:
        patch.setattr("os.close", close)
        told = log.close()
    assert told == f"--log-json {path}: its last lines may be missing: no space or no inodes left: see df and df -i"
    assert log.close() is None
    os.close(*closed)


def test_two_jobs_with_one_file_leave_each_others_lines_whole(path):
    path.write_text("")
    logs = [JsonLog(str(path)) for _ in range(2)]
    for number in range(4):
        logs[number % 2].event("say", text=str(number))
    assert [each["text"] for each in _objects(path)] == ["0", "1", "2", "3"]


def test_a_file_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--log-json: cannot write .*file/log\.json: "):
        JsonLog(str(tmp_path / "file" / "log.json"))
