"""What ranks say at the ends of their programs is there for those that are still in a step."""

from __future__ import annotations

from local_store import local_agents

from hvdlite.rendezvous.elastic_store import LastVotes, leave_last_votes, read_last_votes
from hvdlite.rendezvous.store_client import StoreClient


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
