"""hvdlite-runs in other network namespaces are found by their commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hvdlite_launcher.status import console
from hvdlite_launcher.status.console import elsewhere

WAITS = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        (["/usr/bin/python3", "/opt/bin/hvdlite-run", "-np", "2", "train.py"], True),
        (["hvdlite-run", "-np", "2"], True),
        (["python", "-X", "dev", "-m", "hvdlite_launcher", "-np", "2"], True),
        (["python", "-m", "hvdlite_launcher.host.agent"], False),
        (["vi", "a", "hvdlite-run"], False),
        (["python", "-m"], False),
        ([], False),
    ],
)
def test_a_launcher_is_known_by_its_command(words, is_one):
    assert console._is_launcher([word.encode() for word in words]) is is_one


def test_only_launchers_in_other_namespaces_that_can_be_looked_at_are_elsewhere(tmp_path, monkeypatch):
    program = tmp_path / "hvdlite-run"
    program.write_text(WAITS)
    with subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        # Before a process has begun its program, its command is empty.
        process.stdout.readline()
        assert process.pid not in elsewhere()
        assert console.network_of(process.pid) == os.readlink("/proc/self/ns/net")
        for network, found in (("net:[2]", [process.pid]), ("net:[1]", []), (None, [])):
            networks = {"self": "net:[1]", process.pid: network}
            monkeypatch.setattr(console, "network_of", networks.get)
            assert elsewhere() == found
