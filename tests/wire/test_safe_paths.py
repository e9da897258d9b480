"""Files in directories that others can write: the user's own links are followed, other users' are refused and named."""

import contextlib
import errno
import gc
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.screen.output_records import OutputFiles
from hvdlite_wire.safe_paths import ForeignLinkError, write_file

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what is another user's")
USER, OTHER = 1234, 54321


@pytest.fixture
def tree():
    """Provides a directory that another user can write, outside of pytest's."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@contextlib.contextmanager
def as_user():
    """Within this context, this process is a user who is not root, and ``OTHER`` is another user."""
    os.seteuid(USER)
    try:
        yield
    finally:
        os.seteuid(0)


def written(path, data=b"text"):
    fd = write_file(str(path))
    os.write(fd, data)
    assert os.get_blocking(fd)
    os.close(fd)


def test_directories_are_made_and_an_earlier_file_is_replaced(tmp_path, monkeypatch):
    for data in (b"a longer text", b"text"):
        written(tmp_path / "not" / "yet" / "file", data)
    assert (tmp_path / "not" / "yet" / "file").read_bytes() == b"text"
    monkeypatch.chdir(tmp_path / "not")
    written(Path("yet/../here"))
    assert (tmp_path / "not" / "here").read_bytes() == b"text"


def test_a_directory_that_another_process_makes_at_the_same_time_is_used(tmp_path, monkeypatch):
    make = os.mkdir

    def make_after_another(name, dir_fd):
        make(name, dir_fd=dir_fd)
        make(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", make_after_another)
    os.close(write_file(str(tmp_path / "deep" / "file")))
    assert (tmp_path / "deep" / "file").exists()


def test_the_user_s_own_links_are_followed_wherever_they_are(tmp_path):
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "logs").symlink_to("disk/../disk/deep")
    (tmp_path / "absolute").symlink_to(tmp_path / "logs")
    written(tmp_path / "absolute" / "rank.0" / "stdout")
    assert (tmp_path / "disk" / "deep" / "rank.0" / "stdout").read_bytes() == b"text"
    (tmp_path / "file").symlink_to("disk/new")
    written(tmp_path / "file")
    assert (tmp_path / "disk" / "new").read_bytes() == b"text"
    (tmp_path / "null").symlink_to("/dev/null")
    written(tmp_path / "null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_links_in_a_circle_are_an_error_that_names_them(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / "a" / "file"):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            write_file(str(path))


@NEEDS_ROOT
@pytest.mark.parametrize("link", ["logs", "logs/rank.0", "logs/rank.0/stdout"])
def test_a_link_that_another_user_planted_is_refused_and_named(tree, link):
    shared, victim = tree / "shared", tree / "victim"
    shared.mkdir()
    (victim / "rank.0").mkdir(parents=True)
    files = [victim / "stdout", victim / "rank.0" / "stdout", tree / "precious"]
    for file in files:
        file.write_text("precious")
    for path in (victim, victim / "rank.0", *files):
        os.chown(path, USER, USER)
    planted = shared / link
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.symlink_to(tree / "precious" if link.endswith("stdout") else victim)
    os.chown(planted, OTHER, OTHER, follow_symlinks=False)
    for directory in {shared, shared / "logs", planted.parent} - {planted}:
        if directory.exists():
            directory.chmod(0o777)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    with as_user(), pytest.raises(UsageError) as error:
        OutputFiles(str(shared / "logs"), {0: 0})
    said = f"--output-filename: cannot write {planted}: it is a symbolic link of another user"
    assert str(error.value).startswith(said)
    assert set(os.listdir("/proc/self/fd")) <= before
    assert {file.read_text() for file in files} == {"precious"}


@NEEDS_ROOT
def test_a_link_of_root_s_is_followed_and_a_directory_that_may_only_be_passed_is_passed(tree):
    (tree / "data").mkdir(mode=0o711)
    (tree / "data" / "mine").mkdir()
    os.chown(tree / "data" / "mine", USER, USER)
    (tree / "home").symlink_to("data")
    with as_user():
        written(tree / "home" / "mine" / "file")
    assert (tree / "data" / "mine" / "file").read_bytes() == b"text"


@NEEDS_ROOT
def test_a_file_of_another_user_s_gets_nothing_and_one_with_another_name_stays_as_it_is(tmp_path):
    (tmp_path / "file").write_text("planted")
    os.chown(tmp_path / "file", OTHER, OTHER)
    reader = (tmp_path / "file").open("rb")
    written(tmp_path / "file")
    assert (reader.read(), (tmp_path / "file").read_bytes()) == (b"planted", b"text")
    assert (tmp_path / "file").stat().st_uid == 0
    reader.close()
    (tmp_path / "precious").write_text("precious")
    os.link(tmp_path / "precious", tmp_path / "also")
    written(tmp_path / "also")
    assert ((tmp_path / "precious").read_text(), (tmp_path / "also").read_bytes()) == ("precious", b"text")


def test_what_is_no_file_is_neither_written_nor_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    for name, number in (("pipe", errno.EEXIST), ("socket", errno.EEXIST), ("directory", errno.EISDIR)):
        with pytest.raises(OSError, match=name) as error:
            write_file(str(tmp_path / name))
        assert error.value.errno == number
        assert number == errno.EISDIR or "is not a regular file of yours: give another name" in str(error.value)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="not a regular file of yours"):
        write_file(str(tmp_path / "pipe"))
    os.close(reader)
    assert not isinstance(error.value, ForeignLinkError)
