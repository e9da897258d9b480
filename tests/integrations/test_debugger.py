"""``hvdlite-run --debug-rank`` with the real debugpy: a client connects, and the job goes on."""

from __future__ import annotations

import json
import re
import socket
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import torch, hvdlite as hvd
hvd.init()
print("sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)
"""


class Client:
    """A client of the Debug Adapter Protocol, which attaches and lets the program go on."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._file = self._socket.makefile("rb")
        self._number = 0

    def ask(self, command: str, **arguments: Any) -> None:
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    def wait_for(self, kind: str, name: str) -> None:
        while True:
            length = 0
            while line := self._file.readline().strip():
                length = int(line.split(b":")[1]) if line.startswith(b"Content-Length") else length
            message = json.loads(self._file.read(length))
            if message["type"] == kind and name in (message.get("event"), message.get("command")):
                assert message.get("success", True), message
                return

    def close(self) -> None:
        self._socket.close()


def test_a_rank_waits_for_a_debugger_and_the_job_goes_on_once_there_is_one(launch):
    pytest.importorskip("debugpy")
    job = launch("-np", "2", "--debug-rank", "1", sys.executable, "-c", PROGRAM, env={"OMP_NUM_THREADS": "1"})
    found = None
    for line in job.process.stderr:
        if found := re.search(rb"\[1\]<stderr>:rank 1 on .* waits for a debugger at 127.0.0.1:(\d+) ", line):
            break
    assert found is not None
    client = Client(int(found[1]))
    client.ask("initialize", adapterID="test", clientID="test")
    client.wait_for("response", "initialize")
    client.ask("attach", justMyCode=True)
    client.wait_for("event", "initialized")
    client.ask("configurationDone")
    client.wait_for("response", "attach")
    code, out, err = job.ended()
    client.close()
    assert code == 0, err.decode()
    assert sorted(out.decode().splitlines()) == ["[0]<stdout>:sum 2.0", "[1]<stdout>:sum 2.0"]
    job.assert_gone()
