"""An agent that hears what no launcher says: one line on its stderr names the cause, and nothing is left behind."""

import json
import os
import struct
import subprocess
import sys

import pytest
from hvdlite_launcher.wire.frames import encode
from hvdlite_launcher.wire.messages import Greet, Hello, SignalRanks, Started
from hvdlite_launcher.wire.store_messages import Answer

pytestmark = pytest.mark.slow

GREET = encode(Greet("1", False, False, None))


def frame(kind, payload, length=None):
    return struct.pack(">BII", kind, 0, len(payload) if length is None else length) + payload


def start(**changes):
    job = {
        "token": "0f-1",
        "command": ["sleep", "1000"],
        "cwd": "/",
        "environment": {},
        "inherits": True,
        "peers": [],
        "in_python": False,
        "as_horovod": False,
        "workers": {},
    }
    return frame(16, json.dumps({**job, **changes}).encode())


ODD = {
    "no frame": b"GET / HTTP/1.0\r\n\r\n",
    "endless": frame(16, b"", 2**32 - 1),
    "what an agent says": encode(Hello("1", None, None, 1)),
    "of a worker": encode(Started(0, 1)),
    "an answer that nobody asked for, too early": encode(Answer(1, 0, b"")),
    "nested": frame(16, b"[" * 1_000_000),
    "a signal of another world": GREET + frame(17, b'{"ranks": [0], "signum": 1e999}'),
    "a huge signal": GREET + frame(17, b'{"ranks": [0], "signum": %d}' % 10**400),
    "hello twice": GREET * 2,
    "a job before hello": start(),
    "two jobs": GREET + start() * 2,
    "a directory elsewhere": GREET + start(token="../../tmp/x"),
    "half a character": GREET + start(environment={"A": "\ud800"}),
    "a peer that is no address": GREET + start(peers=["a" * 300]),
    "a worker without a place": GREET + start(workers={"0": {}}),
    "a worker in no room": GREET + start(workers={"0": {"HVDLITE_LOCAL_SIZE": "0", "HVDLITE_SIZE": "1"}}),
    "not JSON": GREET + frame(19, b"\xff"),
}


@pytest.mark.parametrize("program", ["agent", "remote_parent"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_what_no_launcher_says_ends_it_with_one_line(odd, program, tmp_path):
    agent = subprocess.run(
        [sys.executable, "-m", f"hvdlite_launcher.host.{program}"],
        input=odd,
        capture_output=True,
        check=False,
        timeout=60,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    said = agent.stderr.decode()
    assert (agent.returncode, said.count("\n")) == (1, 1), said
    assert said.startswith("hvdlite-run: agent: ")
    assert said.rstrip("\n").isprintable()
    assert list(tmp_path.glob("hvdlite-*")) == []


def test_a_message_that_is_cut_short_is_the_launcher_s_end(tmp_path):
    for whole in (GREET, GREET + start(), GREET + encode(SignalRanks((0,), 9))):
        for cut in (1, 5, 20):
            agent = subprocess.run(
                [sys.executable, "-m", "hvdlite_launcher.host.agent"],
                input=whole[:-cut],
                capture_output=True,
                check=False,
                timeout=60,
                env={**os.environ, "TMPDIR": str(tmp_path)},
            )
            assert (agent.returncode, agent.stderr) == (0, b"")
            assert list(tmp_path.glob("hvdlite-*")) == []
