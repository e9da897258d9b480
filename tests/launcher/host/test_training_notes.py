"""Which programs leave a note, at their end, that they have trained a model and met no other rank."""

from __future__ import annotations

import os
import subprocess
import sys

# Each case runs in a copy of a process that has imported torch once.
CASES = """
import atexit, os, sys
import torch, torch._dynamo, torch.distributed as dist
from torch.distributed import rpc
from hvdlite_launcher.host.worker_hooks import note_at_exit

class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    def step(self, closure=None):
        pass

PARAMS = [torch.nn.Parameter(torch.zeros(2))]
store = lambda: dict(store=dist.HashStore(), rank=0, world_size=1)

def imports_torch(): pass
def evaluates(): PARAMS[0] @ PARAMS[0]
def trains(): torch.optim.AdamW(PARAMS)
def trains_by_its_own_optimizer(): Own(PARAMS)
def trains_after_failing(): trains(); sys.last_value = ValueError()
def is_meant(): trains(); os.environ["HVDLITE_INDEPENDENT"] = "1"
def has_an_unused_process_group(): trains(); dist.init_process_group("gloo", **store())
def has_a_process_group(): has_an_unused_process_group(); dist.all_reduce(torch.ones(1))
def had_a_process_group(): has_a_process_group(); dist.destroy_process_group()
def had_one_at_an_address():
    trains()
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
    dist.destroy_process_group()
    dist.distributed_c10d._backend = None
def calls_others_by_rpc(): trains(); vars(rpc)["_init_counter"] = 1
def uses_mpi(): trains(); sys.modules["mpi4py.MPI"] = sys
def trains_in_a_child():
    if os.fork() == 0:
        trains()
        atexit._run_exitfuncs()
        os._exit(0)
    os.wait()
def trains_once_and_meets_others_then():
    # Two programs of a worker, one after the other.
    for program in (trains, has_a_process_group):
        if os.fork() == 0:
            note_at_exit(os.getcwd(), "trains_once_and_meets_others_then")
            program()
            atexit._run_exitfuncs()
            os._exit(0)
        os.wait()

for name, case in [(name, each) for name, each in vars().items() if type(each) is type(trains) and name != "store"]:
    if case is note_at_exit: continue
    if os.fork() == 0:
        note_at_exit(os.getcwd(), name)
        case()
        atexit._run_exitfuncs()
        os._exit(0)
    os.wait()
"""


def test_a_program_that_made_an_optimizer_and_met_nobody_says_so_unless_it_is_meant(tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith("HVDLITE_")}
    subprocess.run([sys.executable, "-c", CASES], env=env, check=True, cwd=tmp_path)
    notes = {each.name.removeprefix("worker.") for each in tmp_path.iterdir() if each.name != "store"}
    assert notes == {
        "trains.apart",
        "trains_by_its_own_optimizer.apart",
        "has_an_unused_process_group.apart",
        "has_a_process_group.met",
        "had_a_process_group.met",
        "had_one_at_an_address.met",
        "calls_others_by_rpc.met",
        "uses_mpi.met",
        # The agent takes it for one that has met others.
        "trains_once_and_meets_others_then.apart",
        "trains_once_and_meets_others_then.met",
    }
