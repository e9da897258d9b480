"""Files in directories that others can write: another user's links are never followed, wherever in the path."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hvdlite_wire import safe_paths

from hvdlite.timeline import Destination, open_part

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what is another user's")
OTHER = 54321


@pytest.fixture
def _as_user():
    """Within this context, this process is a user who is not root, and ``OTHER`` is another user."""
    os.seteuid(1234)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def tree():
    """Provides a directory that everybody can write, with a valuable file and links of another user in it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o777)
        (directory / "disk").mkdir(mode=0o777)
        (directory / "disk").chmod(0o777)
        (directory / "value").write_text("of value")
        (directory / "value").chmod(0o666)
        for link, target in (("file", "value"), ("missing", "nowhere"), ("way", "disk")):
            (directory / link).symlink_to(target)
            os.chown(directory / link, OTHER, OTHER, follow_symlinks=False)
        yield directory


def written(path: Path, text: str) -> None:
    with open(safe_paths.new_file(str(path)), "w") as file:
        file.write(text)


def test_a_new_file_takes_the_place_of_what_has_its_name_and_links_are_not_written_through(tmp_path):
    (tmp_path / "value").write_text("of value")
    for name in ("link", "plain"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("value")
        written(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
    assert (tmp_path / "value").read_text() == "of value"
    with pytest.raises(OSError, match=str(tmp_path)):
        written(tmp_path / "not" / "there", "new")


def test_text_is_added_at_the_end_through_ones_own_links(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "logs").symlink_to("disk/../disk")
    (tmp_path / "log").symlink_to(tmp_path / "logs" / "real")
    monkeypatch.chdir(tmp_path / "disk")
    for text in ("one\n", "", "two\n"):
        safe_paths.append("../log", text)
    assert (tmp_path / "disk" / "real").read_text() == "one\ntwo\n"
    safe_paths.append("/dev/null", "nothing")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        safe_paths.append(str(tmp_path / "loop"), "")
    with pytest.raises(OSError, match="directory"):
        safe_paths.append(str(tmp_path / "disk"), "")
    with pytest.raises(OSError, match="directory"):
        safe_paths.append("/", "")


@NEEDS_ROOT
@pytest.mark.usefixtures("tree", "_as_user")
@pytest.mark.parametrize("path", ["file", "missing", "way/log"])
def test_another_users_link_is_named_and_not_written_through(tree, path):
    with pytest.raises(OSError, match="is a symbolic link of another user: pass the path that it points to"):
        safe_paths.append(str(tree / path), "text")
    assert (tree / "value").read_text() == "of value"
    assert not (tree / "nowhere").exists()
    assert not list((tree / "disk").iterdir())


@NEEDS_ROOT
@pytest.mark.usefixtures("tree", "_as_user")
def test_a_timeline_is_written_through_none_of_another_users_links(tree):
    with pytest.raises(OSError, match="symbolic link of another user"):
        Destination(f"{tree}/way/t.json", 1).prepare()
    with pytest.raises(OSError, match="symbolic link of another user"):
        Destination(f"{tree}/way/traces/", 1).prepare()
    # One of the names that a timeline uses beside its own.
    for name in ("t.json.unfinished", "t.json.rank.0.part"):
        (tree / "file").rename(tree / name)
        if name.endswith(".part"):
            with open_part(tree / "t.json.rank.0.part") as file:
                file.write(b'{"of": "a rank"},\n')
            assert not (tree / name).is_symlink()
        else:
            Destination(f"{tree}/t.json", 1).write({0: b'{"of": "all"},\n'})
            assert '"all"' in (tree / "t.json").read_text()
            (tree / "file").symlink_to("value")
        assert (tree / "value").read_text() == "of value"


def test_parts_that_are_links_are_none(tmp_path):
    (tmp_path / "secret").write_bytes(b'{"secret": 1},\n')
    (tmp_path / "t.json.rank.1.part").symlink_to("secret")
    (tmp_path / "t.json.rank.\N{SUPERSCRIPT TWO}.part").write_bytes(b"")
    (tmp_path / "t.json.rank.0.part").write_bytes(b'{"own": 1},\n')
    assert Destination(f"{tmp_path}/t.json", 1).parts_there() == {0: tmp_path / "t.json.rank.0.part"}
