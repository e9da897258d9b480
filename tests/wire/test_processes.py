"""What /proc says of a process, whatever its name."""

import os
import subprocess
import sys

import pytest
from hvdlite_wire.linux import exit_statuses, stat_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")

_PARENT = 4


def test_a_name_with_spaces_and_brackets_moves_no_field(tmp_path):
    program = tmp_path / "a ) R 7 (b"
    program.symlink_to(subprocess.run(["which", "sleep"], capture_output=True, text=True, check=True).stdout.strip())
    with subprocess.Popen([program, "1000"]) as process:
        assert stat_of(process.pid)[_PARENT] == os.getpid()
        assert not stat_of(process.pid).has_ended
        assert exit_statuses(process.pid) == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert stat_of(process.pid).has_ended
        assert exit_statuses(process.pid) == [9]
    assert stat_of(process.pid) is None
    assert exit_statuses(process.pid) == []
