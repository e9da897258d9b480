"""A new host that refuses connections from the others, or whose own are refused, costs an elastic job seconds."""

from __future__ import annotations

import sys

import pytest
from e2e.conftest import assert_clean

pytestmark = pytest.mark.slow

PATIENCE_S = 120

# Rank 0 has a host added to the list. The ranks end once they have gone on after that.
PROGRAM = """
import os
import torch
import hvdlite as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
sizes = []
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])


@hvd.elastic.run
def train(state):
    while not sizes:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.batch += 1
        if hvd.rank() == 0 and state.batch == 3:
            with open(os.environ["HOSTS"] + ".new", "w") as hosts:
                hosts.write(os.environ["NEW_HOSTS"])
            os.replace(os.environ["HOSTS"] + ".new", os.environ["HOSTS"])
        state.commit()


train(state)
print("end", hvd.size(), sizes, flush=True)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize("way", ["new host to old one", "old host to new one", "new host to old one, by a reset"])
def test_a_new_host_whose_connections_are_refused_is_given_up_and_named_and_the_others_go_on(
    make_lan, launch, tmp_path, way
):
    lan = make_lan("b", "c")
    old, new = reversed(lan.hosts) if way == "old host to new one" else lan.hosts
    # Of two hosts, gloo connects from the one with the greater address, so one direction is enough.
    refuse = lan.hosts[1].reset_connections_to if "reset" in way else lan.hosts[1].reject_connections_to
    refuse(lan.hosts[0].address)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{old.spec}:2\n")
    env = {"HOSTS": str(hosts), "NEW_HOSTS": f"{old.spec}:2\n{new.spec}:1\n"}
    flags = ["--min-np", "2", "--host-discovery-script", f"cat {hosts}"]
    job = launch(*flags, sys.executable, "-c", PROGRAM, env=env, on=lan.desk)
    code, out, err = job.ended(PATIENCE_S)
    assert code == 0, err.decode()
    assert sorted(out.decode().splitlines()) == [f"[{rank}]<stdout>:end 2 [2]" for rank in range(2)], err.decode()
    why = f"TCP connections between it and {old.spec} are refused, though hvdlite-run reaches both ends"
    assert f"hvdlite-run: lost {new.spec}: {why}" in err.decode()
    assert_clean(lan)
