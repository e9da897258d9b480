"""Files that the user names are read, and a wait for one is told."""

from __future__ import annotations

import os
import threading

from hvdlite_launcher.system import user_files
from hvdlite_launcher.system.user_files import read_user_file


def test_a_pipe_to_which_nobody_has_written_is_waited_for_and_named(tmp_path, monkeypatch):
    pipe, said, is_said = tmp_path / "hosts", [], threading.Event()

    def say(words: str) -> None:
        said.append(words)
        is_said.set()

    def write() -> None:
        assert is_said.wait(60)
        pipe.write_text("node1 slots=2\n")

    os.mkfifo(pipe)
    monkeypatch.setattr(user_files, "say", say)
    monkeypatch.setattr(user_files, "_LONG_S", 0.0)
    writer = threading.Thread(target=write)
    writer.start()
    assert read_user_file(str(pipe), max_bytes=100, what="a hostfile") == b"node1 slots=2\n"
    writer.join()
    assert said[0].startswith(f"still reading '{pipe}': if it is a pipe, this ends once the program that writes")
