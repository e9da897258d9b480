"""An agent that breaks the protocol: one line names the cause, and its messages have no other effect."""

import contextlib
import json
import os
import selectors
import struct
import sys
import threading
from queue import SimpleQueue

import pytest
from hvdlite_launcher.agents.connection_loop import ConnectionLoop
from hvdlite_launcher.agents.remote_agent import RemoteAgent
from hvdlite_launcher.plan.hosts import Host
from hvdlite_launcher.protocol.channel import MARK, encode
from hvdlite_launcher.protocol.messages import (
    AgentSaid,
    Answered,
    Exited,
    Hello,
    InitDone,
    InitFailed,
    InitStarted,
    InputWanted,
    Lost,
    NotThereYet,
    Output,
    Refused,
    Started,
)
from hvdlite_launcher.protocol.store_messages import Ask, Want
from hvdlite_launcher.store.server import Store
from hvdlite_launcher.version import VERSION
from hypothesis import given, settings
from hypothesis import strategies as st

HELLO = encode(Hello(VERSION, 2, "10.0.0.1", 4000, "m"))
NODE = Host("node", 2)


@pytest.fixture(autouse=True)
def no_thread_dies(monkeypatch):
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield
    assert died == []


def agent_of(argv, events, loop, **options):
    options = {"explain": lambda *_: "explained", "store": Store(), **options}
    return RemoteAgent(NODE, argv, events, loop=loop, **options)


@pytest.fixture
def loop():
    with contextlib.closing(ConnectionLoop(pytest.fail)) as loop:
        yield loop


def events_of(said: bytes, tmp_path, workers=()):
    """Returns the events that an agent causes which sends these bytes and ends, up to `Lost`."""
    path = tmp_path / "said"
    path.write_bytes(said)
    events: SimpleQueue = SimpleQueue()
    once_greeted = ["sh", "-c", 'head -c 1 >/dev/null; exec cat "$0"', str(path)]
    with contextlib.closing(ConnectionLoop(pytest.fail)) as loop:
        agent = agent_of(once_greeted, events, loop)
        agent.workers = workers
        agent.greet(count_slots=False, interface=None)
        come = [events.get(timeout=60)]
        while not isinstance(come[-1], Lost):
            come.append(events.get(timeout=60))
        agent.hang_up()
        agent.wait(60)
    assert come[-1].why.isprintable()
    return come


def why(said: bytes, tmp_path, workers=()):
    return events_of(said, tmp_path, workers)[-1].why


def test_an_agent_that_refuses_after_its_greeting_and_before_it_was_told_anything_is_lost_for_that(tmp_path):
    *_, answered, lost = events_of(MARK + HELLO + encode(Refused("no\x1b[2J\nroom", 1)), tmp_path)
    assert isinstance(answered, Answered)
    assert lost == Lost("node", "no\\x1b[2J room")


@pytest.mark.parametrize(
    "early",
    [
        Output(0, "stdout", b"x"),
        Started(0, 5),
        Exited(0, 0),
        InitStarted(0),
        InputWanted(0),
        Want(b"k"),
        Ask(1, 5, b""),
    ],
)
def test_nothing_is_heard_of_workers_before_there_are_any(early, tmp_path):
    assert (
        why(MARK + HELLO + encode(early), tmp_path) == "its hvdlite agent reported on a worker before any was started"
    )


def test_what_is_said_twice_is_told(tmp_path):
    assert why(MARK + HELLO * 2, tmp_path) == "its hvdlite agent sent Hello twice"
    assert (
        why(MARK + HELLO + encode(Exited(1, 0)) * 2, tmp_path, {1})
        == "its hvdlite agent reported the end of worker 1 twice"
    )


def test_workers_of_other_hosts_are_not_its_to_speak_of(tmp_path):
    for message in (InitDone(3), InitFailed(3), Exited(3, 1), Output(3, "stderr", b"x")):
        assert (
            why(MARK + HELLO + encode(message), tmp_path, {1})
            == "its hvdlite agent reported on worker 3, which does not run there"
        )


def test_a_refusal_is_one_line_of_a_sane_length(tmp_path):
    refused = events_of(MARK + HELLO + encode(Refused("a\n" * 300_000, 9)), tmp_path, {1})[1]
    assert (refused.host, refused.exit_code) == ("node", 9)
    assert refused.why.isprintable()
    assert len(refused.why) < 5000


def test_a_version_that_is_no_version_is_told_in_one_line(tmp_path):
    hello = encode(Hello("\x1b]0;owned\x07\n" + "9" * 100_000, None, None, 1))
    assert "version" in why(MARK + hello, tmp_path)


def test_output_without_end_that_nobody_asked_for_ends_it(tmp_path):
    flood = encode(Output(1, "stdout", b"x" * (16 << 20)))
    assert why(MARK + HELLO + flood * 9, tmp_path, {1}) == "its hvdlite agent sent more output than it was allowed to"


def test_words_without_end_on_its_stderr_are_cut(loop):
    events: SimpleQueue = SimpleQueue()
    flood = "import sys; [sys.stderr.write('x' * 100_000) for _ in range(100)]"
    agent_of([sys.executable, "-c", flood], events, loop).greet(count_slots=False, interface=None)
    said = []
    while not isinstance(event := events.get(timeout=60), Lost):
        said.append(event.text)
    assert len("".join(said)) < 2_000_000
    assert said[-1].endswith("... (the rest is not shown)")


def test_the_end_of_agents_that_were_hung_up_on_does_not_touch_the_files_of_a_host_that_has_come(tmp_path, loop):
    # For two minutes at most, should the test fail.
    slow = 'n=0; cat >/dev/null; until test -e "$0" || test $((n=n+1)) -gt 9000; do sleep 0.01; done'
    leaving = [agent_of(["sh", "-c", slow, str(tmp_path / "end")], SimpleQueue(), loop) for _ in range(3)]
    numbers = [agent._process.stdin.fileno() for agent in leaving]
    is_left, ended = threading.Event(), threading.Event()
    reads, writes = os.pipe()

    def take_their_numbers():
        assert all(agent._process.stdin.closed for agent in leaving)
        for number in numbers:
            os.dup2(reads, number)
            loop.selector.register(number, selectors.EVENT_READ, pytest.fail)
        is_left.set()

    def look():
        if all(agent._process.stdout.closed for agent in leaving):
            ended.set()
        else:
            loop.later(0.01, look)

    for agent in leaving:
        agent.greet(count_slots=False, interface=None)
        agent.hang_up()
    loop.call(take_their_numbers)
    assert is_left.wait(60)
    (tmp_path / "end").touch()
    loop.call(look)
    assert ended.wait(60)
    assert all(number in loop.selector.get_map() for number in numbers)
    loop.close()
    for number in (*numbers, reads, writes):
        os.close(number)


class FailingStore(Store):
    """Fails at each message of an agent, as by a mistake in it."""

    def receive(self, agent, message):
        raise KeyError(message.key, agent.host.label)


def test_an_error_in_what_an_agent_causes_costs_this_agent_alone(tmp_path, loop):
    (tmp_path / "said").write_bytes(MARK + HELLO + encode(Want(b"k")))
    script = ["sh", "-c", 'head -c 1 >/dev/null; cat "$0"; exec sleep 600', str(tmp_path / "said")]
    for store, ends in ((FailingStore(), True), (Store(), False)):
        events: SimpleQueue = SimpleQueue()
        agent = agent_of(script, events, loop, store=store)
        agent.workers = {1}
        agent.greet(count_slots=False, interface=None)
        assert isinstance(events.get(timeout=60), Answered)
        if ends:
            assert events.get(timeout=60) == Lost("node", "its connection failed: KeyError(b'k', 'node')")
            assert agent._process.wait(60) == -9
        agent.hang_up()
        agent.wait(0.1)
        assert events.empty()


REFUSED = "ssh: connect to host node port 22: Connection refused"
NOT_THERE = f'echo "{REFUSED}" >&2; exit 255'


def patient_agent(loop, script, *words):
    events, again = SimpleQueue(), SimpleQueue()
    agent = agent_of(
        ["sh", "-c", script, *map(str, words)],
        events,
        loop,
        explain=lambda code, words: f"explained: {words.strip()}",
        try_again=again.put,
    )
    agent.greet(count_slots=False, interface=None)
    return agent, events, again


def test_a_host_that_is_not_there_yet_is_told_so_and_is_not_lost(loop):
    agent, events, again = patient_agent(loop, NOT_THERE)
    assert again.get(timeout=60) is agent
    assert events.get() == NotThereYet("node", "connection refused", f"explained: {REFUSED}")
    assert events.empty()
    assert all(pipe.closed for pipe in (agent._process.stdin, agent._process.stdout, agent._process.stderr))


def test_a_host_that_is_hung_up_on_is_not_tried_again(tmp_path, loop):
    wait = 'n=0; until test -e "$0" || test $((n=n+1)) -gt 9000; do sleep 0.01; done; '
    agent, events, again = patient_agent(loop, wait + NOT_THERE, tmp_path / "there")
    agent.hang_up()
    (tmp_path / "there").touch()
    wait_for_the_end(agent, loop)
    assert events.empty()
    assert again.empty()


def wait_for_the_end(agent, loop):
    ended = threading.Event()

    def look():
        if agent._process.stdout.closed:
            ended.set()
        else:
            loop.later(0.01, look)

    loop.call(look)
    assert ended.wait(60)


def test_the_answer_of_one_that_was_hung_up_on_is_no_event(tmp_path, loop):
    (tmp_path / "said").write_bytes(MARK + HELLO)
    agent, events, _ = patient_agent(
        loop,
        'n=0; head -c 1 >/dev/null; until test -e "$0" || test $((n=n+1)) -gt 9000; do sleep 0.01; done; exec cat "$1"',
        tmp_path / "there",
        tmp_path / "said",
    )
    agent.hang_up()
    (tmp_path / "there").touch()
    wait_for_the_end(agent, loop)
    assert agent._greeted
    assert events.empty()


def test_one_that_was_not_greeted_can_be_discarded(loop):
    agent = agent_of(["sleep", "600"], SimpleQueue(), loop)
    agent.discard()
    process = agent._process
    assert process.returncode == -9
    assert all(pipe.closed for pipe in (process.stdin, process.stdout, process.stderr))


@pytest.mark.parametrize(
    "script",
    [
        'echo "root@node: Permission denied (publickey)." >&2; exit 255',
        f'echo "Welcome"; echo "{REFUSED}" >&2; exit 255',  # written on the host, which was reached
        f'echo "{REFUSED}" >&2; exit 1',
    ],
)
def test_any_other_failure_is_the_last_attempt(script, loop):
    _, events, again = patient_agent(loop, script)
    while isinstance(event := events.get(timeout=60), AgentSaid):
        pass
    assert isinstance(event, Lost)
    assert again.empty()


FRAMES = st.one_of(
    st.sampled_from(
        [
            HELLO,
            *map(
                encode, [Started(0, 1), Exited(0, 1), InitStarted(0), Refused("x", 1), Want(b"k"), Ask(1, 200, b"\xff")]
            ),
            struct.pack(">BII", 1, 0, 2**32 - 1),
        ]
    ),
    st.binary(max_size=30),
    st.builds(
        lambda kind, value: struct.pack(">BII", kind, 0, len(value)) + value,
        st.integers(0, 24),
        st.sampled_from(
            [b"[" * 50_000, b'{"worker": 1e999}', b'{"worker": 0, "pid": NaN}', b"\xff\xfe", b'{"why": "\\ud800"}']
        )
        | st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["worker", "why", "exit_code", "version", "address", "port"]), inner)
            ),
        ).map(lambda value: json.dumps(value).encode()),
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(FRAMES, max_size=5), st.integers(0, 3))
def test_whatever_an_agent_says_it_is_lost_in_one_line(tmp_path_factory, frames, cut):
    said = MARK + b"".join(frames)
    events_of(said[: len(said) - cut], tmp_path_factory.mktemp("agent"), {0})
