"""Files that are replaced as a whole: what is refused before a job, and that nothing but a regular file is replaced."""

import json
import os

import pytest
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.system.user_files import replace_file, require_directory, require_writable, write_json


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is a directory"),
        ("none/x", "create it first"),
        ("file/x", "choose another"),
        ("pipe", "is not a regular file"),
        ("link", "is not a regular file"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_job(tmp_path, name, why):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(UsageError, match=f"--summary: .*{why}"):
        require_writable("--summary", str(tmp_path / name))
    require_writable("--summary", str(tmp_path / "new"))
    with pytest.raises(UsageError, match=r"--summary: .*is a directory"):
        require_writable("--summary", f"{tmp_path}/new/")
    with pytest.raises(UsageError, match="--summary: '' is not the name of a file"):
        require_writable("--summary", "")
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]


def test_a_directory_is_made_and_one_that_cannot_be_is_refused(tmp_path):
    require_directory("--report-dir", str(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path / "a" / "b") == []
    (tmp_path / "file").touch()
    for path, why in (("file", "cannot make the directory"), ("file/b", "cannot make the directory")):
        with pytest.raises(UsageError, match=f"--report-dir: {why} {tmp_path}/{path}: "):
            require_directory("--report-dir", str(tmp_path / path))
    with pytest.raises(UsageError, match="--report-dir: '' is not the name of a directory"):
        require_directory("--report-dir", "")


def test_a_file_is_replaced_and_nothing_is_left_when_that_fails(tmp_path):
    replace_file(str(tmp_path / "f"), "one")
    replace_file(str(tmp_path / "f"), "two \udc80")
    assert (tmp_path / "f").read_text() == "two \\udc80"
    (tmp_path / "d").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(str(tmp_path / "d"), "three")
    assert sorted(os.listdir(tmp_path)) == ["d", "f"]


def test_what_a_flag_asks_for_is_written_as_json_and_a_failure_is_told(tmp_path):
    said = []
    write_json("--summary", str(tmp_path / "s.json"), {"restarts": 2}, said.append)
    assert json.loads((tmp_path / "s.json").read_text()) == {"restarts": 2}
    write_json("--summary", str(tmp_path / "none" / "s.json"), {}, said.append)
    assert said == [f"--summary {tmp_path}/none/s.json: cannot be written: No such file or directory"]
