"""Hosts that come and go while an elastic job runs, with real agents on this machine."""

from __future__ import annotations

import gc
import os
import time
from queue import SimpleQueue

import pytest
from held import grown, held_by
from hvdlite_launcher.agents.agent_group import Agents
from hvdlite_launcher.plan.hosts import Host
from hvdlite_launcher.plan.job_spec import ElasticSpec, JobSpec, Policy
from hvdlite_launcher.plan.worker_environment import WorkerEnvironment
from hvdlite_launcher.protocol.messages import Answered, Started
from hvdlite_launcher.store.server import Store
from reachable import reachable

PATIENCE_S = 60
TURNS = 15


@pytest.mark.slow
def test_a_host_that_comes_and_goes_leaves_nothing_behind_in_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    host = Host("localhost", 1, is_here=True)
    environment = WorkerEnvironment(here=dict(os.environ), elsewhere={})
    elastic = ElasticSpec(Policy(min_np=1))
    job = JobSpec((host,), None, ("sleep", "600"), "/", environment, 1.0, PATIENCE_S, elastic=elastic)
    events: SimpleQueue = SimpleQueue()
    store = Store()
    held = []
    with Agents(job, events, store) as agents:
        for worker in range(1, TURNS + 1):  # not worker 0, which asks for input
            agents.connect_later("localhost", 1)
            answered = events.get(timeout=PATIENCE_S)
            assert isinstance(answered, Answered)
            agents.start_worker("localhost", worker, {}, {"localhost": answered.hello})
            assert isinstance(events.get(timeout=PATIENCE_S), Started)
            agents.leave("localhost")
            del answered
            give_up_at = time.monotonic() + PATIENCE_S
            while reachable(agents, store, events)["RemoteAgent"]:
                assert time.monotonic() < give_up_at
                time.sleep(0.02)
            gc.collect()
            held.append(held_by(os.getpid()))
    assert grown(held[:3], held[-3:]) == {}
    assert not list(tmp_path.glob("hvdlite-*"))
