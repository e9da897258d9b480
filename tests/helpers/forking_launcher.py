"""Is hvdlite-run with local agents from the `rank_server`: `python forking_launcher.py SOCKET ARGUMENT...`."""

from __future__ import annotations

import os
import runpy
import sys

from hvdlite_launcher.agents import agent_group

_STAND_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent_stand_in.py")

if __name__ == "__main__":
    path = sys.argv.pop(1)
    agent_group.local_agent_argv = lambda: [sys.executable, "-S", _STAND_IN, path]
    sys.path[0] = os.getcwd()  # as with -m
    runpy.run_module("hvdlite_launcher", run_name="__main__", alter_sys=True)
