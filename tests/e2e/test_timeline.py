"""Timelines of real processes started by hvdlite-run, and what is left of one if a rank fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from timelines import Span, assert_rows_are_tidy, read_events, read_part, spans

pytestmark = pytest.mark.slow

STEPS = 3
PROGRAM = """
import os, sys, time
import torch
import hvdlite as hvd
from hvdlite.comm import recorder
recorder._FLUSH_S = 1000  # what steps do not bring into the file comes too late
hvd.init(timeout_s=60)
path, end = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()

train(3)
if end != "well" and hvd.rank() == 1:
    # Not before both have written what they did.
    while not all("step 3" in open(f"{path}.rank.{rank}.part").read() for rank in range(2)):
        time.sleep(0.01)
    if end == "killed":
        os.kill(os.getpid(), 9)
    raise ZeroDivisionError
if end != "well":
    train(1)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize(("end", "expected"), [("well", 0), ("raises", 1), ("killed", 128 + 9)])
def test_however_a_rank_ends_it_is_told_what_all_of_them_did(launch, tmp_path, end, expected):
    program, path = tmp_path / "program.py", tmp_path / "timeline.json"
    program.write_text(PROGRAM)
    flags, environment = (
        ([], {"HVDLITE_TIMELINE": str(path)}) if end != "well" else (["--timeline-filename", str(path)], {})
    )
    code, _, err = launch("-np", "2", *flags, sys.executable, str(program), str(path), end, env=environment).ended()
    assert code == expected, err.decode()
    of_rank = [events_of(path, rank) for rank in range(2)]
    for rank, events in enumerate(of_rank):
        assert_rows_are_tidy(events)
        steps = [span["name"] for span in spans(events, rank, "optimizer 1") if span["name"].startswith("step")]
        assert steps == ["step 1", "step 2", "step 3"]
    for step in range(STEPS):
        together = [spans(of_rank[rank], rank, name="all-reduce")[step] for rank in range(2)]
        assert max(span["ts"] for span in together) <= min(span["ts"] + span["dur"] for span in together)
    if end == "well":
        assert {entry.name for entry in tmp_path.iterdir()} & {
            f"timeline.json.rank.{rank}.part" for rank in (0, 1)
        } == set()


def events_of(path: Path, rank: int) -> list[Span]:
    """Returns the events of the timeline, or of the rank's part if rank 0 has ended before it joined the parts."""
    part = path.with_name(f"{path.name}.rank.{rank}.part")
    return read_part(part) if part.exists() else read_events(path)


REMOVES_ITS_DIRECTORY = """
import os, shutil
import hvdlite as hvd
shutil.rmtree(os.path.dirname(os.environ["HVDLITE_TIMELINE"]), ignore_errors=True)
hvd.init(timeout_s=60)
print("goes on")
"""


@pytest.mark.night
def test_an_elastic_job_whose_timelines_directory_has_gone_goes_on_when_its_ranks_connect_again(launch, tmp_path):
    (tmp_path / "gone").mkdir()
    path = tmp_path / "gone" / "t.json"
    program = ("--timeline-filename", str(path), sys.executable, "-c", REMOVES_ITS_DIRECTORY)
    code, out, err = launch("-np", "2", "--min-np", "2", *program).ended()
    assert (code, out.count(b"goes on")) == (0, 2), err.decode()
    assert err.decode().count(f"the timeline '{path}' cannot be written on rank 0") == 1
