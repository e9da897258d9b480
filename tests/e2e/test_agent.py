"""An agent without its launcher: what it answers to commands, and to what no launcher says."""

import json
import os
import struct
import subprocess
import sys

import pytest
from hvdlite_launcher.wire.agent_frames import FROM_AGENT, MARK, Decoder, encode
from hvdlite_launcher.wire.messages import Exited, Greet, Hello, Input, InputWanted, Output, SignalWorkers, Started
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


OWN = {"HVDLITE_RANK": "0", "HVDLITE_SIZE": "1", "HVDLITE_LOCAL_SIZE": "1"}

ODD = {
    "no frame": b"GET / HTTP/1.0\r\n\r\n",
    "endless": frame(16, b"", 2**32 - 1),
    "what an agent says": encode(Hello("1", None, None, 1)),
    "of a worker": encode(Started(0, 1)),
    "an answer that nobody asked for, too early": encode(Answer(1, 0, b"")),
    "nested": frame(16, b"[" * 1_000_000),
    "a signal of another world": GREET + frame(17, b'{"numbers": [0], "signum": 1e999}'),
    "a huge signal": GREET + frame(17, b'{"numbers": [0], "signum": %d}' % 10**400),
    "hello twice": GREET * 2,
    "a job before hello": start(),
    "two jobs": GREET + start() * 2,
    "a directory elsewhere": GREET + start(token="../../tmp/x"),
    "half a character": GREET + start(environment={"A": "\ud800"}),
    "a peer that is no address": GREET + start(peers=["a" * 300]),
    "a worker without a rank": GREET + start(workers={"0": {}}),
    "a worker of no rank": GREET + start(workers={"0": {**OWN, "HVDLITE_RANK": "first"}}),
    "a worker without a place": GREET + start(workers={"0": {"HVDLITE_RANK": "0"}}),
    "a worker in no room": GREET + start(workers={"0": {**OWN, "HVDLITE_LOCAL_SIZE": "0"}}),
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
    for whole in (GREET, GREET + start(), GREET + encode(SignalWorkers((0,), 9))):
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


def test_an_agent_speaks_of_workers_by_their_numbers_whatever_their_ranks(tmp_path):
    # The one with rank 0 has a standard input, and leaves a file with its rank in the name.
    script = 'read line; echo "$HVDLITE_RANK heard $line"; : > "$HVDLITE_JOB_DIR/rank.$HVDLITE_RANK.peer-lost"; exit 3'
    workers = {"7": {**OWN, "HVDLITE_SIZE": "2"}, "0": {**OWN, "HVDLITE_SIZE": "2", "HVDLITE_RANK": "1"}}
    with subprocess.Popen(
        [sys.executable, "-m", "hvdlite_launcher.host.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as agent:
        agent.stdin.write(GREET + start(command=["sh", "-c", script], workers=workers) + encode(SignalWorkers((0,), 9)))
        agent.stdin.flush()
        assert agent.stdout.read(len(MARK)) == MARK
        decoder, heard = Decoder(FROM_AGENT), []
        while sum(isinstance(message, Exited) for message in heard) < 2:
            data = os.read(agent.stdout.fileno(), 1 << 16)
            assert data, "it ended before its workers"
            came = list(decoder.feed(data))
            heard += came
            if InputWanted(7) in came and not any(
                isinstance(message, Exited) and message.worker == 7 for message in heard
            ):
                agent.stdin.write(encode(Input(7, b"a word\n")))
                agent.stdin.flush()
        agent.stdin.close()
    assert {message.worker for message in heard if isinstance(message, Started | InputWanted)} == {0, 7}
    assert b"".join(m.data for m in heard if isinstance(m, Output) and m.worker == 7) == b"0 heard a word\n"
    assert Exited(7, 3, peer_lost=True) in heard
