"""hvdlite-run's store as torch uses it, over a real socket; the launcher is a thread here."""

from __future__ import annotations

import gc
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forked import in_child
from hvdlite_launcher.protocol.messages import InitDone, InitFailed, InitStarted
from hvdlite_launcher.protocol.store_messages import Want
from hvdlite_wire.store_requests import MAX_REQUEST_BYTES, StoreRequest
from local_store import local_agents

import hvdlite as hvd
from hvdlite.errors import says_peer_lost
from hvdlite.rendezvous import launcher_store
from hvdlite.rendezvous.launcher_store import LauncherStore
from hvdlite.rendezvous.store_client import StoreClient

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def agents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # tmp_path may be longer than a socket's path may be
    with local_agents(tmp_path.relative_to(tmp_path), 2) as agents:
        yield agents


@pytest.fixture
def stores(agents):
    """Provides one store on each of two hosts."""
    return [LauncherStore(StoreClient(agent.path), TIMEOUT) for agent in agents]


@pytest.fixture(params=["as it is", "through C++"])
def store(stores, request):
    return stores[0] if request.param == "as it is" else dist.PrefixStore("of", stores[0])


def test_it_does_what_a_store_of_torchs_does(store):
    twin = dist.HashStore()
    for each in (store, twin):
        each.set("text", "ä")
        each.set("text", "ö")
    script = [
        lambda s: s.get("text"),
        lambda s: s.add("n", 5),
        lambda s: s.add("n", -7),
        lambda s: s.get("n"),
        lambda s: s.check(["text", "n"]),
        lambda s: s.check(["text", "no"]),
        lambda s: s.compare_set("text", "ö", "u"),
        lambda s: s.compare_set("text", "ö", "v"),
        lambda s: s.wait(["text", "n"]),
        lambda s: s.wait(["text"], timedelta(seconds=60)),
        lambda s: s.delete_key("n"),
        lambda s: s.delete_key("n"),
        lambda s: s.check(["n"]),
        lambda s: s.append("text", "!"),
        lambda s: s.multi_set(["a", "b"], ["1", "2"]),
        lambda s: s.multi_get(["b", "a", "text"]),
        lambda s: s.has_extended_api(),
        lambda s: s.num_keys(),
    ]
    assert [step(store) for step in script] == [step(twin) for step in script]


def test_bytes_of_every_value_pass(stores):
    value = bytes(range(256)) * 100
    stores[0].set("k", value)
    assert stores[1].get("k") == value


def test_what_one_host_sets_another_that_waits_for_it_gets(stores):
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(stores[1].get, "k") for _ in range(8)]
        stores[0].set("k", "v")
        assert [each.result() for each in waiting] == [b"v"] * 8


def test_readers_of_one_host_make_one_trip_however_many_they_are(agents, stores):
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(stores[1].get, "k") for _ in range(16)]
        stores[0].set("k", "v")
        assert [each.result() for each in waiting] == [b"v"] * 16
    stores[1].wait(["k"])
    assert agents[1].sent == [Want(b"k")]


@pytest.mark.parametrize("wait", [lambda s: s.get("who/1"), lambda s: s.wait(["who/0", "who/1"])])
def test_a_timeout_names_what_did_not_come(monkeypatch, store, wait):
    # It ends as soon as there is an answer, and a busy machine may take long for it.
    monkeypatch.setattr(launcher_store, "_CHECK_S", 60.0)
    store.set("who/0", "here")
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(
        dist.DistStoreError, match=r"timed out after 0\.05 s: no answer from the store about (of/)?who/1$"
    ):
        wait(store)
    store.set_timeout(TIMEOUT)
    assert store.get("who/0") == b"here"


def test_a_timeout_of_one_wait_is_its_own(store):
    with pytest.raises(dist.DistStoreError, match=r"after 0\.01 s"):
        store.wait(["no"], timedelta(milliseconds=10))


def test_what_the_store_refuses_is_an_error_that_names_the_key(store):
    store.set("text", "abc")
    with pytest.raises(dist.DistStoreError, match=r"text.*only numbers"):
        store.add("text", 1)


def test_a_clone_works_and_has_a_timeout_of_its_own(stores):
    clone = stores[0].clone()
    clone.set_timeout(timedelta(seconds=59))
    clone.set("k", "v")
    assert stores[0].get("k") == b"v"
    assert (clone.timeout, stores[0].timeout) == (timedelta(seconds=59), TIMEOUT)


def test_c_plus_plus_finds_its_methods_after_python_has_let_go_of_it(agents):
    prefix = dist.PrefixStore("of", LauncherStore(StoreClient(agents[0].path), TIMEOUT))
    gc.collect()
    prefix.set("k", "v")
    assert prefix.get("k") == b"v"


def test_an_agent_that_is_gone_is_told_as_what_it_is(agents, stores):
    stores[0].set("k", "v")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(stores[0].get, "no")
        stores[0].check(["no"])
        while Want(b"no") not in agents[0].sent:
            stores[0].check(["no"])
        agents[0].close()
        with pytest.raises(dist.DistNetworkError, match="hvdlite-run's agent on this host has ended") as caught:
            waiting.result()
    assert says_peer_lost(caught.value)
    with pytest.raises(dist.DistNetworkError, match="has ended"):
        stores[0].get("k")


def test_a_directory_of_the_job_that_was_removed_is_named_and_not_the_agent(tmp_path):
    (tmp_path / "job").mkdir()
    client = StoreClient(str(tmp_path / "job" / "store"))
    with pytest.raises(ConnectionError, match="agent on this host has ended"):
        client.get([b"k"])
    (tmp_path / "job").rmdir()
    with pytest.raises(ConnectionError, match=r"the job's directory .*/job has been removed.* clean it up") as caught:
        client.get([b"k"])
    assert not says_peer_lost(caught.value)  # which would blame another rank


def test_gloo_meets_over_it(stores):
    def train(rank: int) -> torch.Tensor:
        group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", stores[rank]), rank, 2, TIMEOUT)
        tensor = torch.ones(3) * (rank + 1)
        group.allreduce([tensor]).wait()
        return tensor

    with ThreadPoolExecutor() as pool:
        assert [tensor.tolist() for tensor in pool.map(train, range(2))] == [[3, 3, 3]] * 2


# ----------------------------------------------------------------- the client


def test_a_thread_that_waits_holds_up_no_other_and_connections_are_used_again(agents):
    client = StoreClient(agents[0].path)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get, [b"k"])
        for number in range(100):
            client.set({b"n": b"%d" % number})
        client.set({b"k": b"v"})
        assert waiting.result() == [b"v"]
    assert len(client._idle) <= 2


def test_an_answer_that_comes_too_late_is_nobody_elses(agents):
    client = StoreClient(agents[0].path)
    with pytest.raises(TimeoutError):
        client.get([b"late"], timeout_s=0.01)
    client.set({b"late": b"!"})
    assert client.request(StoreRequest.COUNT) == [b"1"]


@pytest.mark.parametrize("size", [0, 1, 3 << 20, pytest.param(50 << 20, marks=pytest.mark.slow)])
def test_values_of_any_size_pass_in_pieces(agents, size):
    value = os.urandom(min(size, 1 << 20)) * (size >> 20 or 1)
    reader = StoreClient(agents[1].path)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(reader.get_large, b"big", 60)
        StoreClient(agents[0].path).set_large(b"big", value)
        assert read.result() == value


@pytest.mark.parametrize("size", [0, 3, (2 << 20) + 5])
def test_launcher_and_workers_read_each_others_large_values(agents, size):
    client, value = StoreClient(agents[0].path), os.urandom(size)
    assert agents[0].store.get_large(b"up") is None
    client.set_large(b"up", value)
    agents[0].store.put_large(b"down", value)
    assert agents[0].store.get_large(b"up") == value
    assert client.get_large(b"down", 60) == value


@pytest.mark.parametrize("count", [b"2", b"-1", b"9" * 5000, b"x"])
def test_what_is_no_large_value_is_none_to_the_launcher(agents, count):
    StoreClient(agents[0].path).set({b"k": count, b"k/0": b"first"})
    assert agents[0].store.get_large(b"k") is None


def test_a_value_too_large_for_one_request_says_what_to_use(agents):
    with pytest.raises(ValueError, match="set_large"):
        StoreClient(agents[0].path).set({b"k": bytes(MAX_REQUEST_BYTES)})


def test_the_launcher_hears_of_the_ranks_that_join(agents):
    client = StoreClient(agents[0].path)
    client.request(StoreRequest.INIT_STARTED, [b"3"])
    client.request(StoreRequest.INIT_DONE, [b"3"])
    client.request(StoreRequest.INIT_FAILED, [b"3"])
    assert agents[0].sent == [InitStarted(3), InitDone(3), InitFailed(3)]
    with pytest.raises(ValueError, match="no such worker"):
        client.request(StoreRequest.INIT_STARTED, [b"4"])


def test_a_forked_child_has_connections_of_its_own(agents):
    client = StoreClient(agents[0].path)
    client.set({b"k": b"v"})
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if client.get([b"k"], 60) == [b"v"] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.get([b"k"]) == [b"v"]


def test_a_forked_child_that_hangs_up_ends_no_request_of_its_parent(agents):
    client = StoreClient(agents[0].path)
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(client.get, [b"k"], 60)
        while not any(isinstance(each, Want) for each in agents[0].sent):
            assert not waits.done()
        in_child(client.hang_up)
        StoreClient(agents[0].path).set({b"k": b"v"})
        assert waits.result() == [b"v"]


@pytest.mark.parametrize("url", ["file:///s", "unix://", "unix://relative", "/s", ""])
def test_a_store_of_another_version_is_named(url):
    with pytest.raises(hvd.LaunchEnvironmentError, match="the same version"):
        StoreClient.from_url(url)


@pytest.mark.parametrize("answer", [b"", b"\0", b"\0\0\0\0\x05abc"])
def test_an_agent_that_hangs_up_within_an_answer_is_gone(tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionError, match="has ended"):
            StoreClient("s").get([b"k"], 60)
        thread.join()
