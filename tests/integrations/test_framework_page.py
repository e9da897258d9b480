"""The snippets of the manual's page on other frameworks, each in a job of two ranks, with the real packages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

# What each section takes for granted, and what its snippet must have done.
ANY = """
import torch
import hvdlite as hvd
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 2))
loader = torch.utils.data.DataLoader(data, batch_size=2)
"""
LIGHTNING = """
import lightning
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, _):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
model = Model()
"""
IGNITE = """
config = {"epochs": 1}
def training(rank, given):
    assert (given, idist.get_world_size(), idist.model_name()) == (config, 2, "horovod-dist")
"""
# Training can be broken off, and ends with the bits of all parameters.
TORCHDATA = """
import os, zlib
hvd.init()
torch.manual_seed(3)
data = torch.utils.data.TensorDataset(torch.randn(700, 4), torch.randn(700, 2))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
torch.manual_seed(hvd.rank())
steps = 0
def train(x, y):
    global steps
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    steps += 1
    if steps == int(os.environ.get("BREAK_AT", "-1")):
        os._exit(3)
"""
ACCELERATE = """
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
SECTIONS = {
    "PyTorch Lightning": (
        "lightning",
        ANY + LIGHTNING,
        "assert trainer.world_size == 2 and trainer.current_epoch == 10",
    ),
    "Ignite": ("ignite", IGNITE, ""),
    "Lightning's own `ddp`": (
        "lightning",
        ANY + LIGHTNING,
        "trainer.fit_loop.max_epochs = 1\ntrainer.fit(model, loader)\nassert trainer.world_size == 2",
    ),
    "Accelerate": (
        "accelerate",
        ANY + ACCELERATE,
        "assert isinstance(model, torch.nn.parallel.DistributedDataParallel) and accelerator.num_processes == 2\n"
        "for x, y in loader:\n    accelerator.backward((model(x) - y).square().mean())\n    optimizer.step()",
    ),
    "torchdata": (
        "torchdata",
        ANY + TORCHDATA,
        "print('trained', steps, zlib.crc32(b''.join(each.detach().numpy() for each in model.parameters())))",
    ),
}


def snippets_of(section: str) -> str:
    """Returns the Python of a section, one snippet after the other."""
    _, _, rest = PAGE.read_text().partition(f"\n## {section}\n")
    return "\n".join(re.findall(r"```python\n(.*?)```", rest.partition("\n## ")[0], flags=re.DOTALL))


def test_every_snippet_is_in_a_section_that_is_run():
    in_sections = sum(snippets_of(section).strip() != "" for section in SECTIONS)
    assert in_sections == len(SECTIONS) == PAGE.read_text().count("```python")


@pytest.mark.night(but=1)
@pytest.mark.parametrize("section", SECTIONS)
def test_the_snippet_of_a_section_runs(launch, tmp_path, section):
    package, before, after = SECTIONS[section]
    pytest.importorskip(package)
    (tmp_path / "train.py").write_text("\n".join([before, snippets_of(section), after, "print('done')"]))
    flags = ("--horovod",) if package == "ignite" else ()
    env = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    code, out, err = launch(*flags, "-np", "2", sys.executable, "train.py", cwd=tmp_path, env=env).ended()
    assert code == 0, (out + err).decode()
    assert {"[0]<stdout>:done", "[1]<stdout>:done"} <= set(out.decode().splitlines())
