"""Jobs over two hosts that train apart: LocalSGD and DiLoCo in real processes, over a real link."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

# The last fragments are still on their way when the program ends.
TRAIN = """
import hashlib, logging, torch, hvdlite as hvd
hvd.init(timeout_s=60)
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters(), bucket_cap_mb=1e-6,
    outer=hvd.DiLoCo(sync_every=8, fragments=4, delay=3, compression=hvd.Compression.int4))
def loss():
    x = torch.randn(16, 8)
    return (model(x) - x[:, :2]).square().mean()
for step in range(40):
    optimizer.zero_grad()
    (value := loss()).backward()
    if step == 0: first = value.item()
    optimizer.step()
def digest():
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
own = digest()
with optimizer.averaged():
    shared, last = digest(), loss().item()
print("own", own)
print("shared", shared, last < 0.5 * first)
"""


def test_two_hosts_of_two_ranks_share_an_anchor_and_train_apart(launch, make_lan):
    lan = make_lan("a", "b")
    job = launch("-H", "a:2,b:2", "python", "-c", TRAIN, on=lan.desk)
    code, out, err = job.ended()
    assert code == 0, err.decode()
    words = [line.partition(":")[2].split() for line in out.decode().splitlines()]
    shared = [word for word in words if word[:1] == ["shared"]]
    own = [word[1] for word in words if word[:1] == ["own"]]
    assert len(shared) == len(own) == 4
    assert len({each[1] for each in shared}) == 1
    assert all(each[2] == "True" for each in shared)
    # The ranks of a host are equal, and the hosts are not.
    assert sorted(own.count(each) for each in set(own)) == [2, 2]
