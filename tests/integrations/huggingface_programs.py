"""Trains with Hugging Face's Accelerate, and with its Trainer, on the ranks that hvdlite has connected.

    hvdlite-run -np 2 python huggingface_programs.py accelerate|trainer RESULTS

Each rank writes its weights, and those of a plain loop over the whole batches, to RESULTS.RANK.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import hvdlite as hvd

WHOLE_BATCH, SAMPLES = 8, 32


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def with_accelerate() -> dict[str, Any]:
    hvd.init()
    from accelerate import Accelerator  # noqa: PLC0415
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: PLC0415

    accelerator = Accelerator()
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=made), torch.randn(SAMPLES, 2, generator=made))
    torch.manual_seed(7)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = copy.deepcopy(alone)
    with torch.no_grad():
        model[0].weight += hvd.rank()  # rank 0's weights must become all ranks'
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, WHOLE_BATCH // 2))
    shared, buckets = dist.new_group(backend="cpu:hvdshm"), []

    def over_shared_memory(group, bucket):  # DDP refuses annotations that are text
        buckets.append(dist.get_backend(group))
        return allreduce_hook(group, bucket)

    prepared.register_comm_hook(shared, over_shared_memory)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(prepared(inputs), targets))
        accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
        optimizer.step()
    of_alone = torch.optim.AdamW(alone.parameters(), lr=0.02)
    for inputs, targets in DataLoader(data, WHOLE_BATCH):
        of_alone.zero_grad()
        nn.functional.mse_loss(alone(inputs), targets).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        of_alone.step()
    return {
        "weights": weights(model),
        "alone": weights(alone),
        "buckets": set(buckets),
        "gathered": accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
        "sum": hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item(),
    }


def with_trainer() -> dict[str, Any]:
    hvd.init()
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments  # noqa: PLC0415

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    torch.manual_seed(7)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, intermediate_size=16, max_position_embeddings=8, **without)
    alone = BertForSequenceClassification(config)
    model = copy.deepcopy(alone)
    made = torch.Generator().manual_seed(1)
    data = [
        {
            "input_ids": torch.randint(20, (6,), generator=made),
            "labels": torch.randint(2, (), generator=made),
        }
        for _ in range(SAMPLES)
    ]
    arguments = TrainingArguments(
        output_dir=os.path.dirname(sys.argv[2]),
        per_device_train_batch_size=WHOLE_BATCH // 2,
        num_train_epochs=1,
        max_grad_norm=0.5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        average_tokens_across_devices=False,  # else Trainer multiplies this model's loss by the number of ranks
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = InOrder(model, arguments, train_dataset=data, optimizers=(optimizer, constant))
    trainer.train()
    of_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in DataLoader(data, WHOLE_BATCH):
        of_alone.zero_grad()
        alone(**batch).loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        of_alone.step()
    return {
        "weights": weights(model),
        "alone": weights(alone),
        "place": (arguments.process_index, arguments.world_size, arguments.local_process_index),
        "steps": trainer.state.global_step,
        "sum": hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item(),
    }


if __name__ == "__main__":
    kind, results = sys.argv[1:]
    found = with_accelerate() if kind == "accelerate" else with_trainer()
    torch.save(found, f"{results}.{hvd.rank()}")
