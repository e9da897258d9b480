"""The store and the agents' copies of its values, without sockets: messages are delivered when the test says so."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from functools import partial

import pytest
from hvdlite_launcher.protocol.messages import Alive, InitDone, InitFailed, InitStarted
from hvdlite_launcher.protocol.store_messages import Answer, Ask, Drop, Dropped, Have, Revoke, Want
from hvdlite_launcher.store.relay import Cache
from hvdlite_launcher.store.server import Store
from hvdlite_wire.store_requests import DONE, FAILED, MAX_REQUEST_BYTES, StoreRequest, pack, unpack
from hypothesis import given, settings
from hypothesis import strategies as st

SET, GET, WAIT, CHECK, ADD, COMPARE_SET, APPEND, DELETE, COUNT = list(StoreRequest)[:9]


class Host:
    """An agent's cache, and the two queues of messages between it and the store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.up = deque()
        self.down = deque()
        self.sent = []  # all messages that were ever sent to the store
        self.cache = Cache(self._send_up, workers={0})
        self.send = self.down.append

    def _send_up(self, message) -> None:
        self.sent.append(message)
        self.up.append(message)

    def ask(self, operation, *parts):
        """Sends a request and returns a list, which contains the answer once there is one."""
        answers = []
        self.cache.request(operation, pack(parts), lambda *answer: answers.append(answer))
        return answers

    def let_travel(self) -> bool:
        moved = bool(self.up or self.down)
        while self.up:
            self.deliver_up()
        while self.down:
            self.deliver_down()
        return moved

    def deliver_up(self) -> None:
        self.store.receive(self, self.up.popleft())

    def deliver_down(self) -> None:
        self.cache.receive(self.down.popleft())


class Job:
    def __init__(self, size: int) -> None:
        self.store = Store()
        self.hosts = [Host(self.store) for _ in range(size)]

    def settle(self) -> None:
        while any(host.let_travel() for host in self.hosts):
            pass

    def ask(self, host: int, operation, *parts):
        answers = self.hosts[host].ask(operation, *parts)
        self.settle()
        return [(code, unpack(payload)) if code == DONE else (code, payload) for code, payload in answers]


@pytest.fixture
def job():
    return Job(2)


def test_a_value_set_on_one_host_is_read_on_another(job):
    assert job.ask(0, SET, b"k", b"v", b"l", b"w") == [(DONE, [])]
    assert job.ask(1, GET, b"l", b"k", b"l") == [(DONE, [b"w", b"v", b"w"])]
    assert job.ask(1, WAIT, b"k") == [(DONE, [])]
    assert job.ask(0, CHECK, b"k", b"no") == [(DONE, [b"0"])]
    assert job.ask(1, CHECK, b"k", b"l") == [(DONE, [b"1"])]
    assert job.ask(1, COUNT) == [(DONE, [b"2"])]


def test_a_read_waits_until_all_its_keys_are_there(job):
    answers = job.hosts[1].ask(GET, b"a", b"b")
    job.ask(0, SET, b"b", b"2")
    assert answers == []
    job.ask(0, SET, b"a", b"1")
    assert answers == [(DONE, pack([b"1", b"2"]))]


def test_however_many_of_a_host_read_a_key_the_launcher_is_asked_once(job):
    host = job.hosts[1]
    waiting = [host.ask(GET, b"k") for _ in range(50)] + [host.ask(WAIT, b"k") for _ in range(50)]
    job.ask(0, SET, b"k", b"v")
    waiting += [host.ask(GET, b"k") for _ in range(50)]
    assert all(len(answers) == 1 for answers in waiting)
    assert host.sent == [Want(b"k")]


def test_adding_comparing_appending_and_deleting(job):
    assert [job.ask(rank, ADD, b"n", b"5") for rank in (0, 1)] == [[(DONE, [b"5"])], [(DONE, [b"10"])]]
    assert job.ask(0, GET, b"n") == [(DONE, [b"10"])]
    assert job.ask(0, COMPARE_SET, b"c", b"x", b"y") == [(DONE, [b"x"])]
    assert job.ask(0, COMPARE_SET, b"c", b"", b"y") == [(DONE, [b"y"])]
    assert job.ask(1, COMPARE_SET, b"c", b"y", b"z") == [(DONE, [b"z"])]
    assert job.ask(0, COMPARE_SET, b"c", b"y", b"q") == [(DONE, [b"z"])]
    assert job.ask(0, APPEND, b"c", b"!") == [(DONE, [])]
    assert job.ask(1, GET, b"c") == [(DONE, [b"z!"])]
    assert [job.ask(0, DELETE, b"c") for _ in range(2)] == [[(DONE, [b"1"])], [(DONE, [b"0"])]]
    assert job.ask(1, CHECK, b"c") == [(DONE, [b"0"])]


def test_a_change_is_answered_only_once_every_copy_is_dropped():
    job = Job(3)
    job.ask(0, SET, b"k", b"old")
    job.ask(1, GET, b"k")
    job.ask(2, GET, b"k")
    answers = job.hosts[0].ask(SET, b"k", b"new")
    job.hosts[0].let_travel()
    assert job.hosts[1].down == deque([Drop(b"k")])
    job.hosts[2].let_travel()
    job.hosts[2].let_travel()
    job.hosts[0].let_travel()
    assert answers == []
    assert job.ask(1, GET, b"k") == [(DONE, [b"old"])]  # the value has not changed yet
    job.settle()
    assert answers == [(DONE, b"")]
    assert job.ask(1, GET, b"k") == [(DONE, [b"new"])]


@pytest.mark.parametrize(
    "request_", [(ADD, b"k", b"0"), (SET, b"k", b"1"), (COMPARE_SET, b"k", b"9", b"2"), (DELETE, b"no")]
)
def test_what_changes_nothing_costs_no_copy(job, request_):
    job.ask(0, SET, b"k", b"1")
    job.ask(1, GET, b"k")
    job.hosts[1].sent.clear()
    job.ask(0, *request_)
    assert job.hosts[1].sent == []


def test_a_host_that_is_lost_holds_up_nobody(job):
    job.ask(0, SET, b"k", b"old")
    job.ask(1, GET, b"k")
    answers = job.hosts[0].ask(SET, b"k", b"new")
    job.hosts[0].let_travel()
    job.hosts[1].up.append(Want(b"k"))
    job.store.receive(job.hosts[1], job.hosts[1].up.popleft())
    job.store.lose(job.hosts[1])
    job.hosts[0].let_travel()
    assert answers == [(DONE, b"")]
    assert job.ask(0, APPEND, b"k", b"er") == [(DONE, [])]


def test_a_reader_that_has_gone_is_forgotten_and_the_key_still_asked_for_once(job):
    host = job.hosts[0]
    gone = []
    forget = host.cache.request(GET, pack([b"k", b"l"]), lambda *answer: gone.append(answer))
    forget()
    waiting = host.ask(GET, b"k")
    job.ask(1, SET, b"k", b"v", b"l", b"w")
    assert gone == []
    assert waiting == [(DONE, pack([b"v"]))]
    assert host.sent == [Want(b"k"), Want(b"l")]
    forget()


def test_an_answer_for_a_worker_that_has_gone_is_dropped(job):
    gone = []
    job.hosts[0].cache.request(COUNT, b"", lambda *answer: gone.append(answer))()
    job.settle()
    assert gone == []


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ((SET, b"k"), b"no operation"),
        ((SET,), b"no operation"),
        ((ADD, b"k", b"one"), b"only numbers"),
        ((ADD, b"k", b"-"), b"only numbers"),
        ((ADD, b"k", b"1" * 1000), b"only numbers"),
        ((ADD, b"text", b"1"), b"'text': only numbers"),
        ((StoreRequest.INIT_STARTED, b"7"), b"no such worker"),
        ((StoreRequest.INIT_DONE, b"9" * 5000), b"a worker's number is expected"),
        ((StoreRequest.INIT_FAILED, b"0", b"-1"), b"a worker's number is expected"),
        ((StoreRequest.INIT_STARTED,), b"a worker's number is expected"),
    ],
)
def test_what_cannot_be_done_is_answered_with_the_reason(job, request_, why):
    job.ask(0, SET, b"text", b"abc")
    ((code, payload),) = job.ask(0, *request_)
    assert code == FAILED
    assert why in payload


def test_who_calls_init_is_told_by_the_worker_s_number():
    sent = []
    cache = Cache(sent.append, workers={7})
    for operation in (StoreRequest.INIT_STARTED, StoreRequest.INIT_DONE, StoreRequest.INIT_FAILED):
        cache.request(operation, pack([b"7"]), lambda *_: None)
    assert sent == [InitStarted(7), InitDone(7), InitFailed(7)]


def test_who_calls_init_in_an_elastic_job_says_which_generation_it_was_in():
    sent = []
    Cache(sent.append, workers={7}).request(StoreRequest.INIT_STARTED, pack([b"7", b"3"]), lambda *_: None)
    assert sent == [InitStarted(7, after=3)]


def test_a_worker_that_could_not_connect_says_where_it_is_and_who_has_refused_it():
    sent, replies = [], []
    cache = Cache(sent.append, workers={7})
    said = b'[["10.0.0.1"], ["fe80::1", "10.0.0.2"]]'
    cache.request(StoreRequest.INIT_FAILED, pack([b"7", b"3", said]), lambda *_: None)
    assert sent == [InitFailed(7, 3, True, ("10.0.0.1",), ("fe80::1", "10.0.0.2"))]
    for wrong in (b"", b"[]", b'[["x"], []]', b'[["10.0.0.1"], {}]'):
        cache.request(StoreRequest.INIT_FAILED, pack([b"7", b"3", wrong]), lambda *reply: replies.append(reply))
    assert [(code, b"is not Refusals" in payload) for code, payload in replies] == [(FAILED, True)] * 4
    assert len(sent) == 1


def test_a_worker_that_is_asked_whether_it_is_alive_answers_by_its_number():
    sent, replies = [], []
    cache = Cache(sent.append, workers={7})
    cache.request(StoreRequest.ALIVE, pack([b"7", b"3", b"1500"]), lambda *reply: replies.append(reply))
    assert sent == [Alive(7, 3, 1.5)]
    assert replies == [(DONE, b"")]


def test_a_worker_on_several_hosts_says_which_connections_are_silent():
    sent = []
    links = b'[["10.0.0.1", "::1"], {"10.0.0.2": 15.5}]'
    Cache(sent.append, workers={7}).request(StoreRequest.ALIVE, pack([b"7", b"3", b"0", links]), lambda *_: None)
    assert sent == [Alive(7, 3, 0.0, ("10.0.0.1", "::1"), {"10.0.0.2": 15.5})]


@pytest.mark.parametrize(
    "parts",
    [
        [b"8", b"3", b"1500"],
        [b"7", b"3"],
        [b"7", b"3", b"-1"],
        [b"7", b"3", b"1", b"1"],
        [b"7", b"3", b"1", b'[["node1"], {}]'],
        [b"7", b"3", b"1", b'[[], {"::1": "long"}]'],
        [b"7", b"3", b"1", b"[[], {}]", b"x"],
    ],
)
def test_an_answer_that_is_none_is_refused(parts):
    sent, replies = [], []
    cache = Cache(sent.append, workers={7})
    cache.request(StoreRequest.ALIVE, pack(parts), lambda *reply: replies.append(reply))
    assert not sent
    assert [code for code, _ in replies] == [FAILED]


# ------------------------------------------------------- generations that are over

GONE = (FAILED, b"worker 1 was killed")


def test_who_waits_for_a_key_of_a_generation_that_is_over_is_told_why(job):
    waiting = [job.hosts[host].ask(operation, b"world2/k") for host in (0, 1) for operation in (GET, WAIT)]
    mixed = job.hosts[1].ask(GET, b"k", b"world1/k", b"world2/k")
    later = job.hosts[1].ask(GET, b"world3/k")
    job.settle()
    job.store.revoke(2, "worker 1 was killed")
    job.settle()
    assert [*waiting, mixed] == [[GONE]] * 5
    job.ask(0, SET, b"world3/k", b"v", b"k", b"w", b"world10/k", b"x")
    assert later == [(DONE, pack([b"v"]))]
    assert job.ask(1, GET, b"k", b"world10/k") == [(DONE, [b"w", b"x"])]


@pytest.mark.parametrize(
    "request_",
    [
        (GET, b"world2/k"),
        (WAIT, b"k", b"world1/other"),
        (CHECK, b"world2/k"),
        (SET, b"k", b"v", b"world2/k", b"w"),
        (SET, b"world2/k", b"w", b"k", b"v"),
        (ADD, b"world2/n", b"1"),
        (COMPARE_SET, b"world2/k", b"", b"v"),
        (APPEND, b"world2/k", b"v"),
        (DELETE, b"world2/k"),
    ],
)
@pytest.mark.parametrize("is_new", [False, True], ids=["a host that was there", "a host that came later"])
def test_every_later_request_for_a_key_of_a_generation_that_is_over_fails(job, request_, is_new):
    job.ask(0, SET, b"world2/k", b"old")
    job.ask(1, GET, b"world2/k")
    job.store.revoke(2, "worker 1 was killed")
    job.settle()
    if is_new:
        job.hosts.append(Host(job.store))
    assert job.ask(-1, *request_) == [GONE]


def test_a_change_that_waits_for_copies_to_be_dropped_fails_when_its_generation_is_over(job):
    job.ask(0, SET, b"world2/k", b"old")
    job.ask(1, GET, b"world2/k")
    job.hosts[0].cache.request(SET, pack([b"world2/k", b"new"]), lambda *answer: changed.append(answer))
    changed = []
    job.hosts[0].let_travel()
    reading = job.hosts[0].ask(GET, b"world2/k")
    job.hosts[0].let_travel()
    job.store.revoke(2, "worker 1 was killed")
    job.settle()
    assert (changed, reading) == ([GONE], [GONE])


def test_the_newest_reason_counts_and_an_older_generation_changes_nothing(job):
    job.store.revoke(2, "worker 1 was killed")
    job.store.revoke(1, "older")
    assert job.ask(0, GET, b"world1/k") == [GONE]
    job.store.revoke(2, "there is generation 3")
    job.settle()
    assert job.ask(0, GET, b"world1/k") == [(FAILED, b"there is generation 3")]


def test_values_too_large_for_an_answer_are_refused(job):
    half = bytes(MAX_REQUEST_BYTES // 2)
    job.ask(0, SET, b"a", half)
    job.ask(0, SET, b"b", half)
    ((code, payload),) = job.ask(1, GET, b"a", b"b")
    assert (code, b"fewer keys" in payload) == (FAILED, True)
    ((code, payload),) = job.ask(1, APPEND, b"a", half)
    assert (code, b"at most" in payload) == (FAILED, True)


@given(st.lists(st.tuples(st.sampled_from(StoreRequest), st.binary(max_size=12)), max_size=6))
def test_any_payload_is_answered_at_most_once_and_stops_nobody(requests):
    job = Job(1)
    for operation, payload in requests:
        answers = []
        job.hosts[0].cache.request(operation, payload, lambda *answer, into=answers: into.append(answer))
        job.settle()
        assert len(answers) == 1 or (operation in (GET, WAIT) and answers == [])
    job.ask(0, SET, b"k", b"v")
    assert job.store.get(b"k") == b"v"


MESSAGES = st.one_of(
    st.builds(Want, st.binary(max_size=1)),
    st.builds(Dropped, st.binary(max_size=1)),
    st.builds(Ask, st.integers(0, 3), st.integers(0, 255), st.binary(max_size=9)),
)


@given(st.lists(MESSAGES, max_size=8))
def test_whatever_an_agent_says_the_store_answers_the_others(messages):
    job = Job(2)
    for message in messages:
        job.store.receive(job.hosts[0], message)
    job.store.lose(job.hosts[0])
    assert job.ask(1, SET, b"\0", b"v") == [(DONE, [])]
    assert job.ask(1, GET, b"\0") == [(DONE, [b"v"])]


@given(
    st.lists(
        st.one_of(
            st.builds(Have, st.binary(max_size=1), st.binary(max_size=1)),
            st.builds(Drop, st.binary(max_size=1)),
            st.builds(Revoke, st.integers(0, 3), st.text(max_size=3)),
            st.builds(Answer, st.integers(0, 3), st.integers(0, 255), st.binary(max_size=9)),
        ),
        max_size=8,
    )
)
def test_whatever_the_launcher_says_no_reader_is_answered_twice(messages):
    host = Host(Store())
    asked = [host.ask(GET, b"a", b""), host.ask(COUNT)]
    for message in messages:
        host.cache.receive(message)
    assert all(len(answers) <= 1 for answers in asked)


# ------------------------------------------------------- one store for all


@dataclass
class Call:
    """One client's request: when it began, and its answer and when that came; None until then."""

    request: tuple
    began: int
    ended: int | None = None
    answer: list | None = None


def _apply(values: dict, operation, key, *given):
    """Applies a request to a dict: returns the new value (None if unset) and the answer; None if it would wait."""
    old = values.get(key)
    there = b"0" if old is None else b"1"
    if operation == GET and old is None:
        return None
    if operation == COMPARE_SET:
        new = given[1] if old == given[0] or (old is None and not given[0]) else old
        return new, [given[0] if new is None else new]
    total = b"%d" % (int(old or b"0") + int(given[0])) if operation == ADD else None
    return {
        SET: lambda: (given[0], []),
        GET: lambda: (old, [old]),
        CHECK: lambda: (old, [there]),
        ADD: lambda: (total, [total]),
        DELETE: lambda: (None, [there]),
    }[operation]()


def _has_an_order(calls: list[Call]) -> bool:
    """Whether the answers are those of a plain dict that is asked in some order that the times allow."""
    tried = set()

    def search(done: frozenset, values: dict) -> bool:
        left = [i for i in range(len(calls)) if i not in done]
        if all(calls[i].ended is None for i in left):
            return True
        state = done, frozenset(values.items())
        if state in tried:
            return False
        tried.add(state)
        first_end = min(calls[i].ended for i in left if calls[i].ended is not None)
        for i in left:
            if calls[i].began > first_end:
                continue
            applied = _apply(values, *calls[i].request)
            if applied is None or (calls[i].ended is not None and applied[1] != calls[i].answer):
                continue
            if search(done | {i}, {**values, calls[i].request[1]: applied[0]}):
                return True
        return False

    return search(frozenset(), {})


# Mostly the same key, read often: errors need several copies of a value.
KEYS, VALUES = st.sampled_from([b"a", b"a", b"a", b"b"]), st.sampled_from([b"1", b"2", b"3"])
REQUESTS = st.one_of(
    st.tuples(st.just(GET), KEYS),
    st.tuples(st.just(GET), KEYS),
    st.tuples(st.just(GET), KEYS),
    st.tuples(st.just(SET), KEYS, VALUES),
    st.tuples(st.just(SET), KEYS, VALUES),
    st.tuples(st.just(CHECK), KEYS),
    st.tuples(st.just(ADD), KEYS, VALUES),
    st.tuples(st.just(COMPARE_SET), KEYS, st.sampled_from([b"", b"1", b"2"]), VALUES),
    st.tuples(st.just(DELETE), KEYS),
)
HOSTS, CLIENTS, MOST_CALLS = 3, 2, 12


@pytest.mark.slow
@settings(max_examples=400)
@given(st.data())
def test_all_clients_see_one_store_in_whatever_order_messages_travel(data):
    job = Job(HOSTS)
    calls = []
    busy = {}
    clock = itertools.count()

    def begin(client) -> None:
        call = busy[client] = Call(data.draw(REQUESTS), began=next(clock))
        calls.append(call)
        cache = job.hosts[client // CLIENTS].cache
        cache.request(call.request[0], pack(call.request[1:]), partial(end, client, call))

    def end(client, call, code, payload) -> None:
        assert (code, call.answer) == (DONE, None)
        call.answer, call.ended = unpack(payload), next(clock)
        del busy[client]

    for _ in range(data.draw(st.integers(5, 40))):
        moves = [host.deliver_up for host in job.hosts if host.up]
        moves += [host.deliver_down for host in job.hosts if host.down]
        if len(calls) < MOST_CALLS:
            moves += [partial(begin, client) for client in range(HOSTS * CLIENTS) if client not in busy]
        if moves:
            data.draw(st.sampled_from(moves))()
    job.settle()
    assert _has_an_order(calls), calls
    # A request that still waits is for a key that is not set.
    assert all(call.request[0] == GET and job.store.get(call.request[1]) is None for call in busy.values())
