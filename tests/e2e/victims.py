"""Runs jobs as plain processes, without a launcher, and kills one rank at a random point.

Without a launcher, nothing ends the other ranks: they must notice the loss themselves.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Each survivor prints the error that its call raised, and then ends as a program with an uncaught error does.
PROGRAM = """
import os, signal, sys, threading, torch
import hvdlite as hvd

victim, moment, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
hvd.init(timeout_s=60)
torch.set_num_threads(1)
count = 0

def step_on():
    global count
    count += 1
    if hvd.rank() == victim and count >= moment:
        os.kill(os.getpid(), signal.SIGKILL)

def sums(name):
    while True:
        step_on()
        hvd.allreduce(torch.ones(5000), name=name)

def steps():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=0.02)
    while True:
        step_on()
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

def barriers():
    while True:
        step_on()
        hvd.barrier()

def tell(error):
    # At once: two threads may.
    os.write(1, f"TOLD {error}\\n".encode())

def in_thread():
    try:
        sums("in the thread")
    except hvd.HvdliteError as error:
        tell(error)

try:
    if kind == "two threads":
        threading.Thread(target=in_thread, daemon=True).start()
    {"sums": lambda: sums("one"), "steps": steps, "barriers": barriers, "two threads": lambda: sums("main")}[kind]()
except hvd.HvdliteError as error:
    tell(error)
    raise
"""
KINDS = ("sums", "steps", "barriers", "two threads")


@dataclass(frozen=True)
class Outcome:
    """One rank's exit code and output."""

    exit_code: int
    output: str

    @property
    def told(self) -> list[str]:
        """The messages of the errors that its calls raised."""
        return re.findall(r"^TOLD (.*)$", self.output, re.MULTILINE)


def run_plainly(
    python: Sequence[str], size: int, command: Sequence[str], tmp: Path, timeout_s: float = 200, **env: str
) -> list[Outcome]:
    """Runs each rank as a process with RANK and WORLD_SIZE in its environment; returns the outcomes by rank.

    ``python`` is `RankServer.python`, or empty for new processes.
    """
    with socket.socket() as kept:
        # Bound until all ranks have ended, so that no other process gets the port; rank 0 can still listen there.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        return _run_at(kept.getsockname()[1], size, [*python, *command], tmp, timeout_s, env)


def _run_at(
    port: int, size: int, command: Sequence[str], tmp: Path, timeout_s: float, env: dict[str, str]
) -> list[Outcome]:
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    outputs = [tmp / f"rank{rank}" for rank in range(size)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            with output.open("wb") as file:
                environ = {**os.environ, **place, "RANK": str(rank), **env}
                process = subprocess.Popen([sys.executable, *command], env=environ, stdout=file, stderr=file)
                processes.append(process)
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [Outcome(code, output.read_text(errors="replace")) for code, output in zip(codes, outputs, strict=True)]


def kill_one(python: Sequence[str], number: int, tmp: Path, **env: str) -> tuple[str, int, list[Outcome]]:
    """Runs trial ``number``, which is also the random seed; kills one rank.

    Returns a description of the trial, the rank that was killed, and the outcomes of all ranks.
    """
    dice = random.Random(number)
    # Without the check, the collectives of two threads could be in a different order on each rank.
    kinds = KINDS if env.get("HVDLITE_CHECK") != "0" else KINDS[:-1]
    size, kind = dice.choice([2, 3, 4]), kinds[number % len(kinds)]
    victim, moment = dice.randrange(size), dice.randrange(2, 60)
    program = tmp / "program.py"
    program.write_text(PROGRAM)
    outcomes = run_plainly(python, size, [str(program), str(victim), str(moment), kind], tmp, **env)
    assert outcomes[victim].exit_code == -signal.SIGKILL, outcomes[victim].output
    return f"{number}: {kind}, rank {victim} of {size} at {moment}, {env}", victim, outcomes
