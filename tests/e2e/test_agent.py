"""An agent without a launcher: its answers to commands, and its errors for messages that no launcher sends."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
from hvdlite_launcher.protocol.channel import FROM_AGENT, MARK, Decoder, encode
from hvdlite_launcher.protocol.messages import (
    Exited,
    Greet,
    Hello,
    Input,
    InputWanted,
    Output,
    SignalWorkers,
    Started,
    StartWorkers,
)
from hvdlite_launcher.protocol.store_messages import Answer

pytestmark = pytest.mark.slow

GREET = encode(Greet("1", False, False, None))


def frame(kind, payload, length=None):
    return struct.pack(">BII", kind, 0, len(payload) if length is None else length) + payload


def start(**changes):  # as `StartJob` is encoded
    job = {
        "token": "0f-1",
        "command": ["sleep", "1000"],
        "cwd": "/",
        "environment": {},
        "inherits": True,
        "peers": [],
        "in_python": False,
        "as_horovod": False,
        "forks": False,
        "slots": 2,
        "workers": {},
    }
    return frame(16, json.dumps([*{**job, **changes}.values()]).encode())


ODD = {
    "no frame": b"GET / HTTP/1.0\r\n\r\n",
    "endless": frame(16, b"", 2**32 - 1),
    "what an agent says": encode(Hello("1", None, None, 1)),
    "of a worker": encode(Started(0, 1)),
    "an answer that nobody asked for, too early": encode(Answer(1, 0, b"")),
    "nested": frame(16, b"[" * 1_000_000),
    "a signal of another world": GREET + frame(17, b"[[0], 1e999]"),
    "a huge signal": GREET + frame(17, b"[[0], %d]" % 10**400),
    "hello twice": GREET * 2,
    "a job before hello": start(),
    "two jobs": GREET + start() * 2,
    "a directory elsewhere": GREET + start(token="../../tmp/x"),
    "half a character": GREET + start(environment={"A": "\ud800"}),
    "a peer that is no address": GREET + start(peers=["a" * 300]),
    "a host without slots": GREET + start(slots=0),
    "a worker without a number": GREET + start(workers={"first": {}}),
    "more workers before a job": GREET + encode(StartWorkers({0: {}})),
    "a worker twice": GREET + start(workers={"0": {}}) + encode(StartWorkers({0: {}})),
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
    # Worker 0 has a standard input; the other, which is started later, leaves a file with its number in the name.
    script = """
        read line; echo "$HVDLITE_RANK heard $line"
        [ "$line" ] || : > "$HVDLITE_JOB_DIR/worker.$HVDLITE_WORKER.peer-lost"; exit 3
    """
    own = {0: {"HVDLITE_RANK": "1"}, 7: {"HVDLITE_RANK": "0", "HVDLITE_WORKER": "7"}}
    begin = start(command=["sh", "-c", script], workers={0: own[0]}), encode(StartWorkers({7: own[7]}))
    with subprocess.Popen(
        [sys.executable, "-m", "hvdlite_launcher.host.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as agent:
        agent.stdin.write(GREET + b"".join(begin))
        agent.stdin.flush()
        assert agent.stdout.read(len(MARK)) == MARK
        decoder, heard = Decoder(FROM_AGENT), []
        while sum(isinstance(message, Exited) for message in heard) < 2:
            data = os.read(agent.stdout.fileno(), 1 << 16)
            assert data, "it ended before its workers"
            came = list(decoder.feed(data))
            if InputWanted(0) in came and InputWanted(0) not in heard:
                agent.stdin.write(encode(Input(0, b"a word\n")))
                agent.stdin.flush()
            heard += came
        agent.stdin.close()
    assert {message.worker for message in heard if isinstance(message, Started)} == {0, 7}
    assert {message.worker for message in heard if isinstance(message, InputWanted)} == {0}
    wrote = {n: b"".join(m.data for m in heard if isinstance(m, Output) and m.worker == n) for n in (0, 7)}
    assert wrote == {0: b"1 heard a word\n", 7: b"0 heard \n"}
    ends = [message for message in heard if isinstance(message, Exited)]
    assert {replace(end, peak_memory=0) for end in ends} == {Exited(0, 3), Exited(7, 3, peer_lost=True)}
    assert all(end.peak_memory > 0 for end in ends)
