"""Runs hvdlite-run with agents from the `rank_server`, on all hosts: `python forking_launcher.py SOCKET ARGUMENT...`.

With `--function` before the arguments it runs what runs the job of `hvdlite_launcher.run` in its place.

Hosts that are reached over ssh have to be test machines, which share the file system with this one.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys

from hvdlite_launcher.agents import agent_group
from hvdlite_launcher.plan import ssh

_STAND_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent_stand_in.py")
_AGENT = "-m hvdlite_launcher.host.remote_parent"

if __name__ == "__main__":
    path = sys.argv.pop(1)
    os.environ.setdefault("HVDLITE_START_TIMEOUT", "240")  # until the server has imported torch, on a busy machine
    words = ["-S", _STAND_IN, _AGENT, path]  # with what it stands for, by which tests find it
    agent_group.local_agent_argv = lambda: [sys.executable, *words]
    assert _AGENT in ssh._FIND_PYTHON
    ssh._FIND_PYTHON = ssh._FIND_PYTHON.replace(_AGENT, shlex.join(words))
    sys.path[0] = os.getcwd()  # as with -m
    module = "hvdlite_launcher"
    if sys.argv[1:2] == ["--function"]:
        del sys.argv[1]
        module = "hvdlite_launcher.cli.function_runner"
    runpy.run_module(module, run_name="__main__", alter_sys=True)
