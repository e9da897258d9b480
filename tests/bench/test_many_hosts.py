"""A job on many hosts: what it costs hvdlite-run beside the connections themselves does not depend on their number."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("many_hosts.py")


@pytest.mark.slow
@pytest.mark.night(but=1)
@pytest.mark.parametrize("many", [60, 400])
def test_each_host_takes_three_open_files_and_no_thread_and_the_soft_limit_is_no_limit(many):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))

    run = [sys.executable, str(PROGRAM), "2", str(many)]
    printed = subprocess.run(run, preexec_fn=limit, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
    _, few_hosts, many_hosts = (line.split() for line in printed.splitlines())
    assert many_hosts[-2] == few_hosts[-2], "threads"
    assert int(many_hosts[-1]) - int(few_hosts[-1]) == 3 * (many - 2), "open files"
