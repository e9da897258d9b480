"""The launcher's standard input is read one piece at a time, and only on request."""

import os
from queue import SimpleQueue

import pytest
from hvdlite_launcher.job.supervisor import Stdin
from hvdlite_launcher.protocol.messages import InputRead


@pytest.fixture
def pipe():
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb", buffering=0) as reader, os.fdopen(write_end, "wb", buffering=0) as writer:
        yield reader, writer


def test_each_reading_is_answered_once_and_the_end_is_nothing(pipe):
    events = SimpleQueue()
    stdin = Stdin(events, pipe[0].fileno())
    for data in (b"one\n", b"\xff\0"):
        pipe[1].write(data)
        stdin.read()
        assert events.get(timeout=60) == InputRead(data)
    pipe[1].close()
    stdin.read()
    assert events.get(timeout=60) == InputRead(b"")


def test_a_pipe_that_another_process_made_nonblocking_is_waited_for(pipe):
    events = SimpleQueue()
    os.set_blocking(pipe[0].fileno(), False)
    Stdin(events, pipe[0].fileno()).read()
    pipe[1].write(b"late")
    assert events.get(timeout=60) == InputRead(b"late")


def test_what_cannot_be_read_is_at_its_end(pipe, tmp_path):
    directory = os.open(tmp_path, os.O_RDONLY)
    for fd in (directory, pipe[1].fileno()):
        events = SimpleQueue()
        Stdin(events, fd).read()
        assert events.get(timeout=60) == InputRead(b"")
    os.close(directory)
