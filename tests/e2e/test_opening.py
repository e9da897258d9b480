"""A rank that ends, or fails, while an optimizer's engine opens: the others are told at once, and of its own error."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

# Far less than the timeout of these jobs, and more than any of them takes.
PATIENCE_S = 200

PROGRAM = """
import os, sys, time
import torch
import hvdlite as hvd
from hvdlite.comm import gloo_sockets
from hvdlite.comm.group import Group
from hvdlite.rendezvous.store_client import StoreClient
from hvdlite.shm import setup

hvd.init(timeout_s=3000)

def fail(*_, **__):
    if sys.argv[1] == "ends":
        os._exit(0)
    raise OSError(24, "Too many open files")

if hvd.rank() == 1:
    where = {"duplicate": Group, "_make_device": gloo_sockets, "_make_context": setup}[sys.argv[2]]
    setattr(where, sys.argv[2], fail)
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
try:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
except Exception as error:
    print(f"rank {hvd.rank()}: {error}", flush=True)
    # So no rank ends before all have been told.
    store = StoreClient.from_url(os.environ["HVDLITE_STORE"])
    store.set({b"told%d" % hvd.rank(): b""})
    store.get([b"told0", b"told2"])
    sys.exit(3)
"""


@pytest.mark.parametrize("where", ["duplicate", "_make_device", pytest.param("_make_context", marks=pytest.mark.night)])
def test_a_rank_that_ends_while_an_engine_opens_is_named_by_the_others(launch, where):
    code, out, err = _run(launch, "ends", where)
    assert code == 3, err
    for rank in (0, 2):
        (line,) = [each for each in out.splitlines() if f"rank {rank}: " in each]
        assert "rank 1 (localhost) has crashed or was killed before the ranks had connected" in line


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("duplicate", "OSError: [Errno 24] Too many open files"),
        ("_make_device", "this process has too many open files: close some"),
    ],
)
def test_the_error_of_a_rank_that_fails_to_open_its_part_is_told_on_every_rank(launch, where, why):
    code, out, err = _run(launch, "fails", where)
    assert code == 3, err
    (line,) = [each for each in out.splitlines() if "rank 1: " in each]
    assert why.removeprefix("OSError: ") in line
    for rank in (0, 2):
        (line,) = [each for each in out.splitlines() if f"rank {rank}: " in each]
        assert f"rank 1 (localhost) has failed to open its part: {why}" in line


@pytest.mark.night
def test_where_a_rank_cannot_map_the_memory_of_others_all_use_gloo_and_one_warning_says_why(launch):
    code, out, err = _run(launch, "fails", "_make_context")
    assert code == 0, out + err
    (line,) = [each for each in err.splitlines() if "use gloo instead of shared memory" in each]
    assert "rank 1 of 3 cannot map the other ranks' memory: [Errno 24] Too many open files" in line


def _run(launch, how: str, where: str) -> tuple[int, str, str]:
    job = launch(
        *("-np", "3", "python", "-c", PROGRAM, how, where),
        env={"OMP_NUM_THREADS": "1", "HVDLITE_SHM": "0" if where == "_make_device" else "1"},
    )
    code, out, err = job.ended(PATIENCE_S)
    return code, out.decode(), err.decode()
