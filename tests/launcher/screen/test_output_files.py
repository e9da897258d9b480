"""Each worker's output is written to files of its own."""

import errno
import os
import shutil

import pytest
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.protocol.messages import Output
from hvdlite_launcher.screen.output_records import OutputFiles


@pytest.mark.parametrize(
    ("size", "first", "last"),
    [(1, "rank.0", "rank.0"), (10, "rank.0", "rank.9"), (11, "rank.00", "rank.10"), (101, "rank.000", "rank.100")],
)
def test_the_directories_sort_by_rank(tmp_path, size, first, last):
    OutputFiles(str(tmp_path), {rank: rank for rank in range(size)}).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert (len(names), names[0], names[-1]) == (size, first, last)


def test_a_worker_s_files_are_named_by_its_rank(tmp_path):
    files = OutputFiles(str(tmp_path), {7: 0, 0: 1})
    files.output(Output(7, "stdout", b"first"), None)
    files.close()
    assert [(tmp_path / f"rank.{rank}" / "stdout").read_bytes() for rank in (0, 1)] == [b"first", b""]


def test_each_stream_has_its_bytes_and_none_of_an_earlier_job(tmp_path):
    for text in (b"a longer text of an earlier job", b"text"):
        files = OutputFiles(str(tmp_path / "not" / "yet"), {0: 0, 1: 1})
        files.output(Output(1, "stdout", text[:2]), None)
        files.output(Output(1, "stderr", b"\xff\r"), None)
        files.output(Output(1, "stdout", text[2:]), None)
        files.close()
    written = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("std*")}
    assert written == {
        "not/yet/rank.0/stdout": b"",
        "not/yet/rank.0/stderr": b"",
        "not/yet/rank.1/stdout": b"text",
        "not/yet/rank.1/stderr": b"\xff\r",
    }


def test_what_cannot_be_written_is_named_and_nothing_stays_open(tmp_path):
    (tmp_path / "rank.1" / "stderr").mkdir(parents=True)
    before = os.listdir("/dev/fd")
    with pytest.raises(UsageError) as error:
        OutputFiles(str(tmp_path), {0: 0, 1: 1})
    assert str(error.value) == f"--output-filename: cannot write {tmp_path}/rank.1/stderr: Is a directory"
    assert os.listdir("/dev/fd") == before


def test_what_a_process_writes_that_an_ended_worker_has_left_is_in_its_file(tmp_path):
    files = OutputFiles(str(tmp_path), {number: number for number in range(40)})
    for number in range(40):
        files.finish(number)
    files.output(Output(0, "stdout", b"late"), None)
    files.close()
    assert (tmp_path / "rank.00" / "stdout").read_bytes() == b"late"


def test_the_files_of_a_worker_of_an_elastic_job_are_open_until_it_ends(tmp_path):
    files = OutputFiles(str(tmp_path), {}, first=0)
    for worker in range(3):
        files.begin(worker)
        files.output(Output(worker, "stdout", b"text"), None)
        assert len(files._files) == 2
        files.finish(worker)
        files.output(Output(worker, "stdout", b"late"), None)
        assert (tmp_path / f"worker.{worker}" / "stdout").read_bytes() == b"text"
    assert not files._files


def test_a_full_disk_is_told_once_for_all_files_without_a_remedy_that_cannot_help(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"rank.{rank}").mkdir()
        (tmp_path / f"rank.{rank}" / "stdout").symlink_to("/dev/full")
    files = OutputFiles(str(tmp_path), {0: 0, 1: 1})
    told = [files.output(Output(rank, "stdout", b"text"), None) for rank in (0, 0, 1)]
    assert files.output(Output(1, "stderr", b"text"), None) is None
    files.close()
    assert told == [
        f"--output-filename: {tmp_path}/rank.0/stdout cannot be written any more: no space or no inodes left: "
        "see df and df -i. The job goes on without it, and without others like it",
        None,
        None,
    ]
    assert (tmp_path / "rank.1" / "stderr").read_bytes() == b"text"


def test_a_directory_that_is_removed_while_the_job_runs_is_told_once(tmp_path):
    files = OutputFiles(str(tmp_path), {0: 0, 1: 1})
    assert files.output(Output(0, "stdout", b"x"), None) is None
    shutil.rmtree(tmp_path / "rank.0")
    told = [files.output(Output(0, stream, b"x"), None) for stream in ("stdout", "stderr")]
    assert told == [
        f"--output-filename: {tmp_path}/rank.0/stdout cannot be written any more: it was removed. "
        "The job goes on without it, and without others like it",
        None,
    ]
    assert files.output(Output(1, "stdout", b"x"), None) is None
    files.close()
    assert (tmp_path / "rank.1" / "stdout").read_bytes() == b"x"


def test_a_disk_on_a_network_that_is_full_when_a_file_is_closed_is_told(tmp_path, monkeypatch):
    closed = []

    def close(fd):
        closed.append(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    files = OutputFiles(str(tmp_path), {0: 0})
    with monkeypatch.context() as patch:
        patch.setattr("os.close", close)
        told = files.close()
    assert told is not None
    assert told.startswith(f"--output-filename: {tmp_path}/rank.0/stdout lacks its last bytes: this user's disk quota")
    assert len(closed) == 2
    for fd in closed:
        os.close(fd)
