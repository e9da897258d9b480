"""An elastic training program that a scenario breaks: ``python elastic_program.py SCENARIO.json DIRECTORY``.

Each worker appends what it does to a file of its own, ``DIRECTORY/worker.<number>``, one JSON object in a line, so that
nothing that it has done is lost with it. Faults are placed at named points of the program, and of hvd.init and
`State.sync`; each is done once in a job (``DIRECTORY/fired.<id>``). `elastic_scenarios` makes the scenarios, and
`elastic_ledger` reads the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 6
SAMPLES = 48
BATCH = 2  # samples of each rank in a step
LEARNING_RATE = 0.01
MOMENTUM = 0.5
SAMPLER_SEED = 7


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    ).double()  # fmt: skip


def new_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def loss_of(model: nn.Module, indices: Sequence[int]) -> Tensor:
    """The mean loss over the samples with these indices."""
    numbers = torch.tensor(indices, dtype=torch.float64)
    angles = 2 * torch.pi / SAMPLES * numbers[:, None]
    inputs = torch.sin(angles * torch.arange(1, FEATURES + 1, dtype=torch.float64))
    targets = torch.cos(angles)
    return nn.functional.mse_loss(model(inputs), targets)


def bits_of(model: nn.Module) -> str:
    """All parameters, bit by bit."""
    return torch.cat([each.detach().flatten() for each in model.parameters()]).numpy().tobytes().hex()


class Worker:
    """This process: what it is to do, which rank it is, and the file of what it has done."""

    def __init__(self, scenario: dict[str, Any], directory: Path) -> None:
        self.scenario = scenario
        self.directory = directory
        self.number = int(os.environ["HVDLITE_WORKER"])
        self.assignment: Any = None
        self.state: Any = None
        self.has_synchronised = False
        self._file = os.open(directory / f"worker.{self.number}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._told: set[str] = set()

    def note(self, what: str, **details: object) -> None:
        generation = None if self.assignment is None else self.assignment.generation
        line = {"at_s": time.monotonic(), "what": what, "generation": generation, **details}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def at(self, place: str) -> None:
        """This is a place at which the scenario may have a fault."""
        for fault in self.scenario["faults"]:
            if fault["place"] == place and self._is_due(fault):
                self._do(fault)

    def _is_due(self, fault: dict[str, Any]) -> bool:
        # Once it has the state it may be the only one that has it, and its end would lose a commit.
        is_joiner = self.number >= self.scenario["ranks"] and not self.has_synchronised
        own = {"worker": self.number, "rank": None, "size": None, "stage": None}
        if self.assignment is not None:
            own |= {"rank": self.assignment.rank, "size": self.assignment.size}
        if self.state is not None:
            own["stage"] = self.state.stage
        if any(fault[name] not in (None, mine) for name, mine in own.items()) or (fault["joiner"] and not is_joiner):
            return False
        is_early = fault["stage"] is not None and self.state.offset < fault["offset"]
        return not is_early and (fault["after"] is None or self.has(f"fired.{fault['after']}"))

    def _do(self, fault: dict[str, Any]) -> None:
        try:
            os.close(os.open(self.directory / f"fired.{fault['id']}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.note("fault", fault=fault["id"])
        how = fault["how"]
        if how == "raises":
            raise ValueError(f"fault {fault['id']}")
        if how == "exits":
            sys.exit(3)
        if how == "internal error":
            raise hvd.HorovodInternalError(f"fault {fault['id']}")
        os.kill(os.getpid(), signal.Signals[how])

    def tell_events(self) -> None:
        """Rank 0 prints each event of this moment, which the test waits for."""
        for event in self.scenario["events"]:
            is_now = event["stage"] == self.state.stage and self.state.offset >= event["offset"]
            if is_now and self.assignment.rank == 0 and event["id"] not in self._told:
                self._told.add(event["id"])
                self.note("event", event=event["id"])
                print("event", event["id"], flush=True)

    def has(self, name: str) -> bool:
        return (self.directory / name).exists()


def place_faults_within_hvdlite(worker: Worker) -> None:
    """Makes points of hvd.init and of `State.sync` known to the worker."""
    from hvdlite_wire.store_requests import RankAssignment  # noqa: PLC0415

    from hvdlite.elastic import handover, runner  # noqa: PLC0415  # tests that read the samples need neither
    from hvdlite.runtime import bootstrap, make_world  # noqa: PLC0415

    exchange, revoke = make_world.exchange_rank_info, runner.revoke
    submit = handover.submit

    def asked(wait: Callable[..., Any]) -> Callable[..., Any]:
        def asks(*arguments: Any) -> Any:
            worker.note("asks")
            worker.at("asking")
            found = wait(*arguments)
            if isinstance(found, RankAssignment):  # otherwise a program that it may join
                worker.assignment = found
                worker.note("seat", rank=found.rank, size=found.size, newcomers=found.newcomers)
            return found

        return asks

    def exchange_rank_info(*arguments: Any) -> Any:
        worker.at("init, before the exchange")
        exchanged = exchange(*arguments)
        worker.at("init, after the exchange")
        return exchanged

    def revoked(generation: int, why: str) -> None:
        worker.note("revoked", why=why)
        revoke(generation, why)

    def in_the_middle(*arguments: Any) -> Any:
        handle = submit(*arguments)
        worker.at("sync, on its way")
        return handle

    bootstrap.wait_for_rank = asked(bootstrap.wait_for_rank)
    bootstrap.wait_for_rank_or_program = asked(bootstrap.wait_for_rank_or_program)
    make_world.exchange_rank_info = exchange_rank_info
    runner.revoke = revoked
    handover.submit = in_the_middle


def main(scenario: dict[str, Any], directory: Path) -> None:  # noqa: PLR0915  # a program, as people write it
    torch.set_num_threads(1)
    worker = Worker(scenario, directory)
    worker.note("started")
    worker.at("start")
    place_faults_within_hvdlite(worker)
    hvd.init()
    stages = scenario["stages"]
    model = new_model()
    optimizer = hvd.DistributedOptimizer(
        new_optimizer(model), named_parameters=model.named_parameters(), shard=scenario.get("shard")
    )
    model[2].weight.register_hook(lambda _: worker.at("within backward"))

    class State(hvd.elastic.TorchState):  # type: ignore[misc]
        def save(self) -> None:
            worker.at("commit, before saving")
            super().save()
            worker.note("saved", step=self.step)
            worker.at("commit, after saving")

        def restore(self) -> None:
            worker.note("restoring")
            super().restore()
            worker.note("restored", step=self.step)

        def sync(self) -> None:
            worker.at("sync")
            super().sync()
            worker.has_synchronised = True
            worker.note("synced", step=self.step)

    sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=True, seed=SAMPLER_SEED)
    state = worker.state = State(
        model=model, optimizer=optimizer, sampler=sampler, step=0, epoch=0, stage=0, offset=0, samples=0
    )  # fmt: skip

    def on_reset() -> None:
        worker.note("connected")
        worker.at("reset callback")

    state.register_reset_callbacks([on_reset])

    def step(number: int, indices: Sequence[int]) -> None:
        stage = stages[state.stage]
        worker.tell_events()
        worker.note("takes", step=state.step + 1, indices=indices)
        worker.at("before backward")
        optimizer.zero_grad()
        loss = loss_of(model, indices)
        loss.backward()
        worker.at("before step")
        optimizer.step()
        state.sampler.record_batch(number, BATCH)
        state.step += 1
        state.offset += 1
        state.samples += len(indices) * hvd.size()
        worker.note("done", step=state.step, loss=loss.item())
        worker.at("after step")
        is_late = state.offset >= stage["steps"]
        if is_late and hvd.size() == stage["size"]:
            # Ranks may see a file at different times.
            is_over = torch.tensor(int(all(worker.has(name) for name in stage["needs"])))
            if hvd.allreduce(is_over, op=hvd.Min, name="stage is over").item():
                state.stage, state.offset = state.stage + 1, 0
        if is_late:
            time.sleep(0.05)  # while it waits for ranks to come
        # After the last stage a commit could still lead to another generation, with ranks that are no longer expected.
        if state.stage < len(stages) and (is_late or state.step % scenario["commit_every"] == 0):
            state.commit()

    @hvd.elastic.run
    def train(state: Any) -> None:
        worker.note("begins", step=state.step, rank=hvd.rank(), size=hvd.size(), bits=bits_of(model))
        while state.stage < len(stages):
            indices = list(state.sampler)
            for number in range(-(-len(indices) // BATCH)):
                step(number, indices[number * BATCH : (number + 1) * BATCH])
                if state.stage == len(stages):
                    return
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)

    train(state)
    bits = bits_of(model)
    worker.note("ends", step=state.step, samples=state.samples, rank=hvd.rank(), size=hvd.size(), bits=bits)
    print("end", hvd.rank(), hvd.size(), state.step, hashlib.sha256(bits.encode()).hexdigest(), flush=True)


if __name__ == "__main__":
    import hvdlite.torch as hvd

    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
