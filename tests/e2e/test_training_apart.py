"""Jobs whose ranks train without each other end with one warning; those that meet, fail, or mean it, with none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

TRAINS = """
import os, sys, torch
def train(wrap=lambda model: model):
    model = wrap(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
RANKS = f"""
import os, sys
rank = int(os.environ["RANK"])
if rank == 3:  # imports no torch
    sys.exit()
{TRAINS}
if rank == 0 or rank == 4:
    train()
elif rank == 1:
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
elif rank == 2:
    # A group of its own making; any other is as good.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    train()
    torch.distributed.destroy_process_group()
"""
INIT = f"""
import hvdlite as hvd
{TRAINS}
if sys.argv[1] == "adopts":
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
hvd.init()
if sys.argv[1] == "adopts":
    train()
elif sys.argv[1] == "ddp":
    train(torch.nn.parallel.DistributedDataParallel)
elif sys.argv[1] == "broadcast":
    train()
    hvd.broadcast_object(1)
    hvd.shutdown()
else:
    train()
if sys.argv[1] == "fails" and hvd.rank() == 1:
    sys.exit(3)
"""


def warnings(err: bytes) -> list[str]:
    return [line for line in err.decode().splitlines() if "warning" in line]


def test_ranks_that_met_nobody_are_named_once(launch):
    code, _, err = launch("-np", "5", sys.executable, "-c", RANKS).ended()
    assert code == 0, err.decode()
    (line,) = warnings(err)
    assert line.startswith("hvdlite-run: warning: ranks 0, 4 trained without each other")
    assert "call hvd.init(), and wrap the optimizer" in line


@pytest.mark.parametrize(
    ("case", "flags", "expected"),
    [
        ("apart", (), 1),
        ("apart", ("--independent",), 0),
        ("apart", ("--min-np", "2"), 1),
        ("ddp", (), 0),
        ("adopts", (), 0),
        ("broadcast", (), 0),
        ("fails", (), 0),
    ],
)
def test_ranks_that_called_init_are_named_if_they_exchanged_nothing(launch, case, flags, expected):
    code, _, err = launch("-np", "2", *flags, sys.executable, "-c", INIT, case).ended()
    assert (code == 0) == (case != "fails"), err.decode()
    found = warnings(err)
    assert len(found) == expected, err.decode()
    for line in found:
        assert line.startswith("hvdlite-run: warning: ranks 0, 1 trained without each other")
        assert "hvd.init()" not in line


def test_functions_in_workers_are_warned_of_too(launch, rank_server):
    program = f"import hvdlite\n{TRAINS}\nhvdlite.run(train, np=2)\nprint(hvdlite.run(train, np=2, independent='true'))"
    program = rank_server.line_for_functions() + program
    code, out, err = launch(program=(*rank_server.python(), "-c", program)).ended()
    assert (code, out) == (0, b"[None, None]\n"), err.decode()
    assert len(warnings(err)) == 1, err.decode()


@pytest.mark.night(but=2)
@pytest.mark.parametrize(("case", "independent", "expected"), [("apart", "0", 1), ("apart", "1", 0), ("ddp", "0", 0)])
def test_under_another_launcher_rank_0_warns(tmp_path, rank_server, case, independent, expected):
    (tmp_path / "train.py").write_text(INIT)
    python = [sys.executable, *rank_server.python()]
    torchrun = [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", *python]
    env = {**os.environ, "HVDLITE_INDEPENDENT": independent}
    words = [*torchrun, "train.py", case]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    found = [line for line in done.stderr.splitlines() if "made an optimizer" in line]
    assert len(found) == expected, done.stderr
    for line in found:
        assert "rank 0 of 2 made an optimizer, and exchanged nothing with other ranks" in line
