"""Plugin with the fixture `rank_server`, a process from which ranks of jobs are forked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_HELPERS = Path(__file__).parent
# It leaves no name in the main program, which is the workers' too.
_CODE = """
__import__("atexit").register(lambda: __import__("rank_server").end_without_unloading())
__import__("sys").path[0] = {helpers!r}
__import__("rank_server").main({listener}, {modules})
"""


class RankServer:
    """A process that has imported torch, and other ``modules``, from which ranks of jobs are forked (`rank_server`)."""

    def __init__(self, directory: Path, modules: tuple[str, ...] = ()) -> None:
        self._path = directory / "server"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self._path))
            listener.listen()
            code = _CODE.format(helpers=str(_HELPERS), listener=listener.fileno(), modules=modules)
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )

    def launcher(self) -> tuple[str, ...]:
        """Returns the arguments by which Python runs hvdlite-run with such ranks."""
        return str(_HELPERS / "forking_launcher.py"), str(self._path)

    def python(self) -> tuple[str, ...]:
        """Returns the arguments by which Python runs such a copy, before those of its program. A signal kills it."""
        return "-S", str(_HELPERS / "agent_stand_in.py"), "--python", str(self._path)

    def line_for_functions(self) -> str:
        """Returns a statement after which `hvdlite_launcher.run`, in the same program, has such ranks."""
        words = (*self.launcher(), "--function")
        return f"__import__('hvdlite_launcher.cli.caller', fromlist=['_']).__dict__['_RUNNER'] = {words!r}\n"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    with tempfile.TemporaryDirectory(prefix="ranks") as directory:
        server = RankServer(Path(directory))
        yield server
        server.close()
