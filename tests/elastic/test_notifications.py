"""The thread that listens to hvdlite-run during `elastic.run`, with its real store; the launcher is the test."""

from __future__ import annotations

import json
import queue
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hvdlite_wire.store_requests import RankAssignment
from local_store import local_agents

from hvdlite.elastic import State, runner
from hvdlite.rendezvous import elastic_store
from hvdlite.rendezvous.store_client import StoreClient

PATIENCE_S = 60
ADDED, REMOVED = 2, 1


class Noted(State):
    """Tells the test at once what it hears of hosts."""

    def __init__(self) -> None:
        super().__init__(lambda value: value, lambda: 0)
        self.heard: queue.SimpleQueue = queue.SimpleQueue()

    def on_hosts_updated(self, timestamp, update_res):
        self.heard.put((timestamp, update_res))


@pytest.fixture
def agent(monkeypatch):
    # Not in tmp_path, which may be longer than a socket's path may be.
    with tempfile.TemporaryDirectory() as directory, local_agents(Path(directory)) as (agent,):
        monkeypatch.setenv("HVDLITE_STORE", f"unix://{agent.path}")
        yield agent


@pytest.fixture
def revoked(monkeypatch):
    """The generations that were revoked, each with the reason."""
    revoked: queue.SimpleQueue = queue.SimpleQueue()
    monkeypatch.setattr(runner, "revoke", lambda generation, why: revoked.put((generation, why)))
    # A busy machine may take long until the thread that is to end runs at all.
    monkeypatch.setattr(elastic_store, "_ENDS_WITHIN_S", float(PATIENCE_S))
    return revoked


@pytest.fixture(autouse=True)
def world(monkeypatch, revoked):
    """Puts this process into generation 2 of an elastic job, as rank 0."""
    assignment = RankAssignment(generation=2, rank=0, size=2, newcomers=0)
    world = SimpleNamespace(assignment=assignment, topology=SimpleNamespace(rank=0), survival=None)
    monkeypatch.setattr(runner, "current_world", lambda: world)
    return world


def tell(agent, number, timestamp, *, added=False, removed=False):
    news = {"timestamp": timestamp, "added": added, "removed": removed}
    agent.store.put(b"world2/hosts/%d" % number, json.dumps(news).encode())


def listeners():
    return [thread for thread in threading.enumerate() if thread.name == "hvdlite-elastic"]


def test_rank_0_hears_of_each_change_of_hosts_in_order(agent):
    state = Noted()
    with runner.listening(state):
        tell(agent, 0, 1.5, added=True)
        tell(agent, 1, 2.5, removed=True)
        tell(agent, 2, 3.5, added=True, removed=True)
        heard = [state.heard.get(timeout=PATIENCE_S) for _ in range(3)]
    assert heard == [(1.5, ADDED), (2.5, REMOVED), (3.5, ADDED | REMOVED)]


def test_what_changed_while_no_function_ran_is_heard_by_the_next_one(agent):
    with runner.listening(Noted()):
        pass
    tell(agent, 0, 1.5, added=True)
    state = Noted()
    with runner.listening(state):
        assert state.heard.get(timeout=PATIENCE_S) == (1.5, ADDED)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_the_generation_ends_the_thread_and_revokes_the_world_of_every_rank(agent, revoked, world, rank):
    world.topology.rank = rank
    with runner.listening(Noted()):
        (thread,) = listeners()
        agent.store.revoke(2, "worker 1 was killed")
        assert revoked.get(timeout=PATIENCE_S) == (2, "worker 1 was killed")
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert revoked.empty()


def test_a_generation_that_had_ended_before_revokes_the_world_at_once(agent, revoked):
    agent.store.revoke(3, "there is generation 4")
    with runner.listening(Noted()):
        assert revoked.get(timeout=PATIENCE_S) == (2, "there is generation 4")


def test_no_thread_and_no_connection_is_left_when_the_function_ends(agent, revoked):
    with runner.listening(Noted()):
        (thread,) = listeners()
    assert not thread.is_alive()
    agent.store.revoke(2, "worker 1 was killed")
    assert revoked.empty(), "nobody listened any more"


def test_the_thread_ends_though_it_was_hung_up_on_before_it_had_connected(agent, monkeypatch):
    hung_up = threading.Event()
    hang_up, get = StoreClient.hang_up, StoreClient.get

    def hang_up_and_say_so(client):
        hang_up(client)
        hung_up.set()

    def get_late(client, keys, timeout_s=None):
        assert hung_up.wait(PATIENCE_S)
        return get(client, keys, timeout_s)

    monkeypatch.setattr(StoreClient, "hang_up", hang_up_and_say_so)
    monkeypatch.setattr(StoreClient, "get", get_late)
    with runner.listening(Noted()):
        (thread,) = listeners()
    assert not thread.is_alive()


def test_the_thread_ends_when_the_agent_does_and_that_revokes_nothing(agent, revoked):
    with runner.listening(Noted()):
        (thread,) = listeners()
        agent.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert revoked.empty()


def test_a_world_that_is_not_of_an_elastic_job_has_no_such_thread(world):
    world.assignment = None
    with runner.listening(Noted()):
        assert not listeners()
