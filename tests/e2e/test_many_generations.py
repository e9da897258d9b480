"""Elastic jobs of many generations: nothing piles up in launcher, agent and workers, nor in their files.

With TEST_HVDLITE_LONG=1 there are a thousand generations, and memory is looked at too.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import held
import pytest
from held import grown
from long_run import IS_LONG, chosen, trials

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200 if IS_LONG else 800)]

GENERATIONS = trials(30, 1000)
PATIENCE_S = 7000 if IS_LONG else 700

# At each generation a worker writes what it holds into a file of its own, and rank 0 what launcher and agent hold. The
# others wait for it meanwhile, in their next collective or for their next key.
LOOK = f"""
import gc, json, os, sys
sys.path.insert(0, {str(Path(held.__file__).parent)!r})
from held import held_by, launcher_and_agent, memory_kib

directory, last = sys.argv[1], {GENERATIONS}
me = os.environ["HVDLITE_WORKER"]
pids = {{"self": os.getpid(), **launcher_and_agent()}}


def look(count_keys, generation, is_first):
    if generation > 20 and generation % (last // 20) and generation < last - 5:
        return
    gc.collect()
    told = {{"generation": generation}}
    for name, pid in pids.items() if is_first else [("self", os.getpid())]:
        told[name] = held_by(pid)
        told[f"memory of {{name}}"] = memory_kib(pid)
    if is_first:
        told["job"] = {{
            "keys": int(count_keys()[0]),
            "files": len(os.listdir(os.environ["HVDLITE_JOB_DIR"])),
        }}
    with open(os.path.join(directory, f"worker.{{me}}"), "a") as file:
        print(json.dumps(told), file=file)
"""

# The ranks meet; then the newest kills itself, and all others see the generation revoked. Speaks the store's protocol
# itself, since hvdlite imports torch, and there are hundreds of workers.
WITHOUT_TORCH = (
    LOOK
    + """
import signal, socket, struct

SET, GET, COUNT, INIT_STARTED, INIT_DONE = 1, 2, 9, 10, 11


class Client:
    def __init__(self):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ["HVDLITE_STORE"].removeprefix("unix://"))

    def request(self, operation, parts=()):
        payload = b"".join(struct.pack(">I", len(part)) + part for part in parts)
        self.socket.sendall(struct.pack(">BI", operation, len(payload)) + payload)
        failed, length = struct.unpack(">BI", self.socket.recv(5, socket.MSG_WAITALL))
        answer = self.socket.recv(length, socket.MSG_WAITALL) if length else b""
        if failed:
            raise ValueError(answer.decode())
        parts = []
        while answer:
            (length,) = struct.unpack_from(">I", answer)
            parts.append(answer[4 : 4 + length])
            answer = answer[4 + length :]
        return parts


client, number, after = Client(), me.encode(), 0
while True:
    client.request(INIT_STARTED, [number, b"%d" % after])
    _, after, rank, size, _ = json.loads(client.request(GET, [b"rank/%b/%d" % (number, after)])[0])
    world = b"world%d/" % after
    client.request(SET, [world + b"%d" % rank, number])
    client.request(GET, [world + b"%d" % each for each in range(size)])
    client.request(INIT_DONE, [number, b"%d" % after])
    if rank < size - 1:
        look(lambda: client.request(COUNT), after, rank == 0)
    client.request(SET, [world + b"looked%d" % rank, b""])
    try:
        client.request(GET, [world + b"looked%d" % each for each in range(size)])
        if after >= last:
            sys.exit()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        client.request(GET, [world + b"end"])
    except ValueError:
        pass
"""
)

WITH_TORCH = (
    LOOK
    + """
import signal, time
import torch, hvdlite.torch as hvd
from hvdlite_wire.store_requests import StoreRequest
from hvdlite.rendezvous.store_client import StoreClient
from hvdlite.runtime.world import last_assignment

hvd.init({arguments})
client = StoreClient.from_url(os.environ["HVDLITE_STORE"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


def step():
    optimizer.zero_grad()
    model(torch.ones(3, 4)).pow(2).mean().mul(0.01).backward()
    optimizer.step()
    state.step += 1
    state.commit()


@hvd.elastic.run
def train(state):
    generation = last_assignment().generation
    step()
    look(lambda: client.request(StoreRequest.COUNT), generation, hvd.rank() == 0)
    step()
    if generation >= last:
        return
    {leave}


train(state)
"""
)

STAY = """
    if generation % 3 == 0:
        raise hvd.HorovodInternalError("of the program's own")
    raise hvd.elastic.HostsUpdatedInterrupt(skip_sync=generation % 3 == 1)
"""
REPLACED = """
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the other is lost, or a new one has come
        step()
        time.sleep(0.02)
"""


def with_torch(leave: str, arguments: str = "") -> str:
    return WITH_TORCH.replace("    {leave}\n", leave).replace("{arguments}", arguments)


ALL_STAY = with_torch(STAY, "process_sets=[hvd.ProcessSet([0])]")

# A program, the least ranks with which it goes on, and its environment.
FORMS: dict[str, tuple[str, int, dict[str, str]]] = {
    "all stay": (ALL_STAY, 2, {}),
    "all stay, over gloo": (ALL_STAY, 2, {"HVDLITE_SHM": "0"}),
    "all stay, with memory that is kept": (ALL_STAY, 2, {"HVDLITE_SURVIVE": "1"}),
    "one is replaced": (with_torch(REPLACED), 1, {}),
    "one is replaced, without torch": (WITHOUT_TORCH, 2, {}),
}


USUAL_FORMS = [form for form in FORMS if form != "one is replaced"]


@pytest.mark.night
@pytest.mark.parametrize("form", chosen([*FORMS], USUAL_FORMS))
def test_nothing_piles_up_over_the_generations_of_a_job(launch, tmp_path, form):
    program, least, env = FORMS[form]
    with (tmp_path / "stderr").open("wb") as stderr:
        job = launch(
            *("-np", "2", "--min-np", str(least), "--max-restarts", "100000", "-H", "localhost:2"),
            *("python", "-c", program, tmp_path),
            env=env,
            stderr=stderr,
        )
        code, _, _ = job.ended(PATIENCE_S)
    err = (tmp_path / "stderr").read_text()
    assert code == 0, err[-4000:]
    assert f"hvdlite-run: generation {GENERATIONS}: " in err
    those_that_stayed = 0
    for file in sorted(tmp_path.glob("worker.*")):
        told = [json.loads(line) for line in file.read_text().splitlines()]
        if told[0]["generation"] > 1 or told[-1]["generation"] < GENERATIONS:
            continue  # it has replaced another, or was replaced
        those_that_stayed += 1
        early = [each for each in told if 6 <= each["generation"] <= 12]
        late = [each for each in told if each["generation"] > GENERATIONS - 6]
        for kind in ("self", "launcher", "agent", "remote parent", "job"):
            if kind in told[0]:
                assert grown([each[kind] for each in early], [each[kind] for each in late]) == {}, (file.name, kind)
        if IS_LONG:
            print(f"\n{form}, {file.name}, KiB in each generation: {memory_per_generation(told)}")
    assert those_that_stayed == (2 if program == ALL_STAY else 1)
    job.assert_gone()


def memory_per_generation(told: list[dict]) -> dict[str, float]:
    """In KiB, by the medians of the second tenth and of the last one."""
    early = [each for each in told if GENERATIONS / 10 <= each["generation"] <= GENERATIONS / 5]
    late = [each for each in told if each["generation"] >= GENERATIONS * 9 / 10]
    return {
        kind: (statistics.median(each[kind] for each in late) - statistics.median(each[kind] for each in early))
        / (late[-1]["generation"] - early[-1]["generation"])
        for kind in told[0]
        if kind.startswith("memory")
    }
