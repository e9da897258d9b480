"""Process sets of real processes, whose engines connect through the stores of torch.distributed."""

from __future__ import annotations

import sys
import textwrap

import pytest

BODY = """
import os, sys
import torch
import hvdlite as hvd

def train(process_set):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model, process_set)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=process_set)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.arange(8.0).view(2, 4).pow(hvd.rank() + 1)).square().mean().backward()
        optimizer.step()
    return optimizer, round(model[0].weight.sum().item(), 5)

def use_sets():
    outer, inner = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[outer], timeout_s=60)
    for _ in range(3):
        hvd.add_process_set(inner)
        for each in (outer, inner):
            if each.included():
                assert hvd.allgather_object(hvd.rank(), process_set=each) == each.ranks
        assert hvd.remove_process_set(inner)
    hvd.add_process_set(inner)
    hvd.add_process_set([1])
    kept = [train(each) for each in (outer, inner)]
    a, b = [hvd.allgather_object(result) for _, result in kept]
    assert a[0] == a[2] != a[1] and b[1] == b[2] != b[0] and a[1] != b[1], (a, b)
    return kept
"""


def _run(launch, tmp_path, body: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(BODY + textwrap.dedent(body))
    code, out, err = launch("-np", "3", sys.executable, str(path)).ended()
    assert code == 0, err.decode()
    assert out.count(b"done") == 3
    assert b"terminate called" not in err


@pytest.mark.slow
def test_sets_overlap_train_come_and_go_and_a_program_ends_in_peace_with_some_registered(launch, tmp_path):
    # Their engines and optimizers still exist when the interpreter ends.
    _run(launch, tmp_path, "kept = use_sets(); print('done')")


@pytest.mark.night
@pytest.mark.slow
def test_sets_of_a_second_world_over_the_programs_own_store_meet_anew(launch, tmp_path):
    body = """
    import torch.distributed as dist
    store = dist.FileStore(os.environ["HVDLITE_JOB_DIR"] + "/own", 3)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["HVDLITE_RANK"]), world_size=3)
    for _ in range(2):
        for optimizer, _ in use_sets():
            optimizer.close()
        hvd.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)
    # PyTorch 2.13 now and then aborts where the interpreter goes before a thread of the program's own gloo group.
    os._exit(0)
    """
    _run(launch, tmp_path, body)
