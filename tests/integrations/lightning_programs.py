"""Trains small models with Lightning in all ways that `hvdlite.lightning` supports, one after the other in one process.

    python lightning_programs.py hvdlite|ddp|one RESULTS

Each rank writes what each scenario returns to RESULTS.RANK. ``one`` trains on the whole batch in one process, to which
the others are compared; ``ddp`` uses Lightning's own DDP on the ranks that `hvd.init` has connected.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdlite as hvd
from hvdlite.lightning import HvdliteStrategy

KIND, RESULTS = sys.argv[1:]
SIZE = 1 if KIND == "one" else int(os.environ["WORLD_SIZE"])
WHOLE_BATCH = 8


def data(samples: int = 48) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 4, generator=made), torch.randn(samples, 2, generator=made), torch.arange(samples)
    )


def loader(shuffle: bool = False) -> DataLoader:
    """Draws in order, the ranks together as one process; ``shuffle``: with the sampler that Lightning puts in."""
    samples = data()
    sampler = None if shuffle or SIZE == 1 else DistributedSampler(samples, SIZE, hvd.rank(), shuffle=False)
    return DataLoader(samples, batch_size=WHOLE_BATCH // SIZE, shuffle=shuffle, sampler=sampler)


class Regression(lightning.LightningModule):
    def __init__(self, *, normalizes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7 + hvd.rank())  # rank 0's weights must become all ranks'
        middle = nn.BatchNorm1d(8) if normalizes else nn.Tanh()
        self.layers = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 2))
        self.drawn: list[int] = []
        self.before_step: list[Tensor] = []
        self.after_backward: list[Tensor] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.drawn += batch[2].tolist()
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor]) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def on_after_backward(self) -> None:
        self.after_backward.append(self.layers[0].weight.grad.clone())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before_step.append(self.layers[0].weight.grad.clone())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
        }


class Gan(lightning.LightningModule):
    """Two optimizers, by manual optimization; ``toggles``: each with the other's parameters frozen."""

    def __init__(self, *, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.generator, self.discriminator = nn.Linear(4, 2), nn.Linear(2, 1)
        self.toggles = toggles

    def training_step(self, batch: list[Tensor]) -> None:
        optimizers = self.optimizers()
        losses = (
            lambda: self.discriminator(self.generator(batch[0])).square().mean(),
            lambda: (
                (self.discriminator(batch[1]) - 1).square().mean()
                + self.discriminator(self.generator(batch[0]).detach()).square().mean()
            ),
        )
        for optimizer, loss in zip(optimizers, losses, strict=True):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), lr=0.02) for each in (self.generator, self.discriminator)]


def trainer(strategy_arguments: dict[str, Any] | None = None, **arguments: Any) -> lightning.Trainer:
    if KIND == "hvdlite":
        given: dict[str, Any] = {"strategy": "hvdlite"}
        if strategy_arguments is not None:
            given = {"strategy": HvdliteStrategy(**strategy_arguments)}
    else:
        given = {"strategy": "ddp", "devices": SIZE} if KIND == "ddp" else {"devices": 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(**{"max_epochs": 2, "enable_checkpointing": False, **quiet, **given, **arguments})


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def plain() -> Any:
    model, made = Regression(), trainer()
    made.fit(model, loader(), loader())
    metrics = {name: value.item() for name, value in made.callback_metrics.items()}
    drawn = model.drawn
    tested = made.test(model, loader(), verbose=False)[0] | made.validate(model, loader(), verbose=False)[0]
    made = trainer(max_epochs=1)
    made.fit(model, loader())  # a second fit of the same model, with a new optimizer
    return {"weights": weights(model), "metrics": metrics, "tested": tested, "drawn": drawn, "sizes": made.world_size}


def shuffled() -> Any:
    lightning.seed_everything(5)
    model, made = Regression(), trainer(max_epochs=2)
    made.fit(model, loader(shuffle=True))
    return {"drawn": model.drawn}


def halved() -> Any:
    model = Regression()
    trainer({"compression": hvd.Compression.fp16, "bucket_cap_mb": 1e-6}).fit(model, loader())
    return {"weights": weights(model)}


def accumulated() -> Any:
    model = Regression()
    trainer(accumulate_grad_batches=4).fit(model, loader())  # six batches: the second step of an epoch has two
    return {"weights": weights(model), "passes": model.after_backward, "averages": model.before_step}


def clipped(algorithm: str, value: float) -> Any:
    model = Regression()
    trainer(gradient_clip_val=value, gradient_clip_algorithm=algorithm).fit(model, loader())
    return {"weights": weights(model), "averages": model.before_step}


def resumed() -> Any:
    folder = hvd.broadcast_object(tempfile.mkdtemp())
    keep = ModelCheckpoint(dirpath=folder, save_last=True)
    trainer(max_epochs=1, enable_checkpointing=True, callbacks=[keep]).fit(Regression(), loader())
    before = sorted(path.name for path in Path(folder).iterdir())
    model, made = Regression(), trainer(max_epochs=2)
    made.fit(model, loader(), ckpt_path=keep.last_model_path)
    made.save_checkpoint(Path(folder) / "end.ckpt")
    saved = torch.load(Path(folder) / "end.ckpt", weights_only=True)
    model.load_state_dict(saved["state_dict"])
    return {"weights": weights(model), "files": before, "state": saved["optimizer_states"][0]["state"]}


def gan(toggles: bool) -> Any:
    model = Gan(toggles=toggles)
    trainer().fit(model, loader())
    return {"weights": weights(model)}


def mixed() -> Any:
    model = Regression()
    trainer(precision="bf16-mixed").fit(model, loader())
    return {"weights": weights(model)}


def normalized() -> Any:
    model = Regression(normalizes=True)
    trainer(sync_batchnorm=KIND == "hvdlite").fit(model, loader())
    return {
        "weights": weights(model),
        "buffers": [*model.layers[1].buffers()],
        "layer": type(model.layers[1]).__name__,
    }


def collectives() -> Any:
    """Calls the strategy's own collectives, as callbacks do."""
    strategy = trainer().strategy
    strategy.setup_environment()
    rank = float(strategy.global_rank)
    gathered = strategy.all_gather(torch.tensor([rank]))
    strategy.barrier("all")
    return {
        "mean": strategy.reduce(torch.tensor(rank)).item(),
        "sum": strategy.reduce(torch.tensor(rank), reduce_op="sum").item(),
        "broadcast": strategy.broadcast({"from": rank}),
        "gathered": gathered.tolist(),
        "all": strategy.reduce_boolean_decision(rank == 0),
        "any": strategy.reduce_boolean_decision(rank == 0, all=False),
    }


SCENARIOS = {
    "plain": plain,
    "shuffled": shuffled,
    "halved": halved,
    "accumulated": accumulated,
    "clipped by norm": lambda: clipped("norm", 0.3),
    "clipped by value": lambda: clipped("value", 0.03),
    "resumed": resumed,
    "gan": lambda: gan(toggles=True),
    "gan without toggling": lambda: gan(toggles=False),
    "mixed": mixed,
    "normalized": normalized,
    "collectives": collectives,
}

OF_DDP = ("plain", "accumulated", "clipped by norm", "resumed")

if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    hvd.init()
    results = {name: SCENARIOS[name]() for name in (OF_DDP if KIND == "ddp" else SCENARIOS)}
    torch.save(results, f"{RESULTS}.{hvd.rank()}")
