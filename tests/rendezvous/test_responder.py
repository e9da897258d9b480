"""A rank answers hvdlite-run's question whether it responds."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from hvdlite_wire.store_requests import StoreRequest

from hvdlite.rendezvous import elastic_store
from hvdlite.rendezvous.launchers import ElasticWorker


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
