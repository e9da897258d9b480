"""A worker of an elastic job waits for its rank, answers hvdlite-run, and reads what others have left at their ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from hvdlite_wire.store_requests import ANSWERS, Dismissal, RankAssignment, StoreRequest, assignment_key, standby_key
from local_store import local_agents

import hvdlite as hvd
from hvdlite.errors import WorkerRemovedError
from hvdlite.rendezvous import elastic_store
from hvdlite.rendezvous.elastic_store import (
    LastVotes,
    find_program,
    leave_last_votes,
    read_last_votes,
    take_back,
    tell_of_program,
    wait_for_rank,
    wait_for_rank_or_program,
)
from hvdlite.rendezvous.launchers import ElasticWorker, read_elastic_worker, read_placement
from hvdlite.rendezvous.store_client import StoreClient

WORKER = {
    "HVDLITE_ELASTIC": "1", "HOROVOD_ELASTIC": "1", "HVDLITE_WORKER": "7", "HVDLITE_STORE": "unix:///s",
    "HVDLITE_JOB_DIR": "/d", "HVDLITE_HOST": "b", "HVDLITE_LOCAL_RANK": "3",
}  # fmt: skip


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # its own path may be longer than a socket's
    with local_agents(tmp_path.relative_to(tmp_path)) as (agent,):
        yield agent


def test_a_rank_and_the_environment_make_a_placement_whose_local_rank_is_the_slot():
    assert read_elastic_worker(WORKER) == ElasticWorker(7, "unix:///s")
    placement = read_placement(WORKER, RankAssignment(generation=4, rank=1, size=2, newcomers=0))
    assert (placement.rank, placement.size, placement.local_rank, placement.node) == (1, 2, 3, "b")
    assert (placement.worker, placement.store_url, placement.launcher) == (7, "unix:///s", None)


def test_before_init_an_elastic_worker_has_no_placement():
    with pytest.raises(hvd.LaunchEnvironmentError, match=r"has no rank before hvd.init\(\)"):
        read_placement(WORKER)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HVDLITE_ELASTIC": "1"},
        # A static job within an elastic one, torchrun within it, and mpirun.
        {**WORKER, "HVDLITE_RANK": "0", "HVDLITE_SIZE": "1"},
        {**WORKER, "RANK": "0", "WORLD_SIZE": "1"},
        {**WORKER, "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_others_are_no_elastic_workers(environ):
    assert read_elastic_worker(environ) is None


@pytest.mark.parametrize("name", ["HVDLITE_STORE", "HVDLITE_LOCAL_RANK"])
def test_a_missing_variable_is_named(name):
    environ = {key: value for key, value in WORKER.items() if key != name}
    with pytest.raises(hvd.LaunchEnvironmentError, match=f"{name} is not set"):
        read_placement(environ, RankAssignment(1, 0, 1, 1))


def test_a_worker_waits_until_it_is_given_a_rank(agent):
    client = StoreClient(agent.path)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait_for_rank, client, 7, 3)
        agent.store.put(assignment_key(7, 0), ANSWERS.encode(RankAssignment(1, 2, 4, 1)))
        agent.store.put(assignment_key(7, 3), ANSWERS.encode(RankAssignment(5, 2, 4, 1)))
        assert waiting.result(60) == RankAssignment(5, 2, 4, 1)


def test_an_agent_that_is_gone_while_a_worker_waits_for_its_rank_is_told(agent):
    asked = threading.Event()
    send = agent.cache._send
    agent.cache._send = lambda message: (send(message), asked.set())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait_for_rank, StoreClient(agent.path), 7, 0)
        assert asked.wait(60)
        agent.close()
        with pytest.raises(hvd.CommunicationError, match=r"worker 7 was given no rank: .* has ended"):
            waiting.result(60)


def test_a_worker_that_is_dismissed_is_told_why(agent):
    agent.store.put(assignment_key(7, 3), ANSWERS.encode(Dismissal("b has been removed")))
    with pytest.raises(WorkerRemovedError, match="worker 7 has been removed from the job: b has been removed"):
        wait_for_rank(StoreClient(agent.path), 7, 3)


def test_a_process_that_does_not_catch_its_removal_ends_well_and_without_a_traceback():
    program = "from hvdlite.errors import WorkerRemovedError; raise WorkerRemovedError('gone')"
    run = subprocess.run([sys.executable, "-c", program], timeout=100, check=False, capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")


def test_a_new_worker_hears_of_a_program_that_it_can_join_at_once_or_while_it_waits_for_a_rank(agent):
    client = StoreClient(agent.path)
    assert find_program(client) is None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait_for_rank_or_program, StoreClient(agent.path), StoreClient(agent.path), 7)
        tell_of_program(client, ["a", "a", "b"])
        assert waiting.result() == ("a", "a", "b")
    assert find_program(client) == ("a", "a", "b")


@pytest.mark.parametrize(("answer", "can"), [(b"1", True), (b"0", False)])
def test_a_worker_that_takes_back_that_it_has_asked_waits_for_the_answer_whether_it_can(agent, answer, can):
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(take_back, StoreClient(agent.path), 7)
        agent.store.put(standby_key(7), answer)
        assert waiting.result(60) is can


def test_a_new_worker_that_is_given_a_rank_first_takes_that(agent):
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait_for_rank_or_program, StoreClient(agent.path), StoreClient(agent.path), 7)
        assignment = RankAssignment(1, 0, 1, 1)
        StoreClient(agent.path).set({assignment_key(7, 0): ANSWERS.encode(assignment)})
        assert waiting.result() == assignment


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Mock:
    client = Mock()
    monkeypatch.setattr(elastic_store, "StoreClient", Mock(from_url=lambda _: client))
    monkeypatch.setattr(elastic_store, "KeyListener", lambda client, key, on_value, on_end: on_value)
    return client


def test_an_answer_has_how_long_the_rank_has_waited_and_what_it_knows_of_its_links(client):
    keepalive = Mock(addresses=("10.0.0.1",), silences=lambda: {"10.0.0.2": 1.5})
    answer = elastic_store.respond(ElasticWorker(3, "unix:///x"), lambda: 2.5, lambda: keepalive)
    answer(b"7")
    client.request.assert_called_once_with(
        StoreRequest.ALIVE, [b"3", b"7", b"2500", b'[["10.0.0.1"],{"10.0.0.2":1.5}]']
    )


def test_a_rank_that_can_open_no_more_files_answers_without_its_links(client):
    keepalive = Mock(silences=Mock(side_effect=OSError("Too many open files")))
    answer = elastic_store.respond(ElasticWorker(3, "unix:///x"), lambda: 0.0, lambda: keepalive)
    answer(b"7")
    client.request.assert_called_once_with(StoreRequest.ALIVE, [b"3", b"7", b"0"])


def test_all_that_was_left_is_read_in_every_generation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # its own path may be longer than a socket's
    with local_agents(tmp_path.relative_to(tmp_path)) as (agent,):
        one, other = StoreClient(agent.path), StoreClient(agent.path)
        assert read_last_votes(other) == []
        leave_last_votes(one, LastVotes({0: 7}))
        assert read_last_votes(other) == [LastVotes({0: 7})]
        agent.store.revoke(3, "a worker has ended")
        leave_last_votes(other, LastVotes({0: 7}, frozenset({(0, 6)})))
        assert read_last_votes(one) == [LastVotes({0: 7}), LastVotes({0: 7}, frozenset({(0, 6)}))]
