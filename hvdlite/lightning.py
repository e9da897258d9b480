"""
`HvdliteStrategy`: trains with PyTorch Lightning on the ranks of hvdlite.

    Trainer(strategy=HvdliteStrategy()) ── hvd.init ── fit ── the module's optimizers, each a DistributedOptimizer

    from hvdlite.lightning import HvdliteStrategy

    trainer = lightning.Trainer(strategy=HvdliteStrategy(compression=hvd.Compression.fp16))

    hvdlite-run -np 4 python train.py

Importing this module also registers the name: ``Trainer(strategy="hvdlite")``. The class derives from Lightning's, of
which there are two: if the program has imported ``pytorch_lightning`` and not ``lightning``, it is for that one.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from .comm.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from .ops.api import allreduce, barrier
from .ops.batch_norm import SyncBatchNorm
from .ops.broadcast import broadcast_object, broadcast_parameters
from .optim.optimizer import DistributedOptimizer
from .optim.optimizer_state import broadcast_optimizer_state
from .runtime.world import cross_rank, cross_size, init, is_initialized, local_rank, local_size, rank, size
from .values import shown

__all__ = ["HvdliteEnvironment", "HvdliteStrategy"]

# By the name of Lightning's reduce_op, which is that of torch.distributed's too.
_OPS: dict[str, ReduceOp] = {"avg": Average, "mean": Average, "sum": Sum, "min": Min, "max": Max, "product": Product}


def _lightning_names() -> tuple[str, str]:
    """Returns the names of Lightning's two packages, for PyTorch and for what Fabric shares with it."""
    names = [("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")]
    for pair in sorted(names, key=lambda pair: pair[0] not in sys.modules):
        try:
            # Not by its first name alone: a program may have a module `lightning` of its own.
            importlib.import_module(pair[0])
        except ModuleNotFoundError as error:
            if error.name not in (pair[0], pair[0].partition(".")[0]):
                raise  # one that Lightning itself needs
        else:
            return pair
    raise ImportError("hvdlite.lightning needs PyTorch Lightning, which is not installed: pip install lightning")


_PYTORCH, _FABRIC = _lightning_names()
_ClusterEnvironment: Any = importlib.import_module(f"{_FABRIC}.plugins").ClusterEnvironment
_ParallelStrategy: Any = importlib.import_module(f"{_PYTORCH}.strategies").ParallelStrategy
_registry: Any = importlib.import_module(f"{_PYTORCH}.strategies").StrategyRegistry
_TorchSyncBatchNorm: Any = importlib.import_module(f"{_PYTORCH}.plugins").TorchSyncBatchNorm
_fitting: Any = importlib.import_module(f"{_PYTORCH}.trainer.states").TrainerFn.FITTING
_reset_seed: Any = importlib.import_module(f"{_FABRIC}.utilities.seed").reset_seed


class HvdliteEnvironment(_ClusterEnvironment):  # type: ignore[misc]  # of type Any: Lightning may not be installed
    """Lightning's view of hvdlite's ranks. It is read only: hvdlite-run, or another launcher, has started them."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return False  # it is the strategy that says so

    def world_size(self) -> int:
        return size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return local_rank()

    def node_rank(self) -> int:
        return cross_rank()


class HvdliteStrategy(_ParallelStrategy):  # type: ignore[misc]  # of type Any: Lightning may not be installed
    """Trains a LightningModule on all ranks of the job, with gradients averaged by `DistributedOptimizer`.

    Every rank must make one Trainer with it, which calls `hvdlite.init` unless the program has. The number of ranks is
    the launcher's: leave out the Trainer's ``devices`` and ``num_nodes``. Each rank uses the GPU of its local rank.

    Parameters and buffers are rank 0's when ``fit``, ``validate``, ``test`` or ``predict`` begins. In between, buffers
    such as the averages of batch normalization become rank 0's when a validation begins and when training ends.
    ``sync_batchnorm=True`` normalizes over all ranks, on CPUs too.

    ``timeout_s``: as in `hvdlite.init`. ``accelerator``, ``parallel_devices``, ``checkpoint_io`` and
    ``precision_plugin`` are those of Lightning's strategies. All other arguments are those of `DistributedOptimizer`,
    such as ``compression`` and ``bucket_cap_mb``, and count for every optimizer of the module. To accumulate, use the
    Trainer's ``accumulate_grad_batches``. An optimizer that ``configure_optimizers`` has wrapped itself stays as it is.

    Gradients are averages when ``on_before_optimizer_step`` is called and when they are clipped.
    """

    strategy_name = "hvdlite"

    # Lightning's, which are of type Any here.
    model: Any
    optimizers: Any

    def __init__(
        self,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        timeout_s: float | None = None,
        **optimizer_arguments: Any,
    ) -> None:
        _check_arguments(optimizer_arguments)
        self._optimizer_arguments = optimizer_arguments
        self._timeout_s = timeout_s
        # The layers that `SyncBatchNorm` replaces while fit runs, by their names in the module.
        self._batch_norms: dict[str, _BatchNorm] = {}
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=HvdliteEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="hvdlite's ranks and DistributedOptimizer")

    def set_world_ranks(self) -> None:
        """Connects to the other ranks. Lightning calls it when the Trainer is made."""
        init(self._timeout_s)
        for module in ("lightning_utilities.core.rank_zero", f"{_PYTORCH}.utilities.rank_zero"):
            importlib.import_module(module).rank_zero_only.rank = rank()

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def num_nodes(self) -> int:
        # Lightning looks for it before it calls `set_world_ranks`.
        return cross_size() if is_initialized() else 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        pass  # the launcher's number counts

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": size(), "rank": rank()}

    @property
    def root_device(self) -> torch.device:
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type == "cpu":
            return devices[0]
        if local_rank() < len(devices):
            return devices[local_rank()]
        if torch.cuda.device_count() == 1:  # as where CUDA_VISIBLE_DEVICES gives each rank its own
            return devices[0]
        raise ValueError(
            f"the Trainer has {len(devices)} of this host's GPUs for {local_size()} ranks: leave out devices=, so that "
            "each rank uses the GPU of its local rank"
        )

    def setup_environment(self) -> None:
        self.set_world_ranks()
        super().setup_environment()
        _reset_seed()

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == _fitting:
            if isinstance(self._layer_sync, _TorchSyncBatchNorm):
                modules = self.model.named_modules()
                self._batch_norms = {name: layer for name, layer in modules if isinstance(layer, _BatchNorm)}
                self.model = SyncBatchNorm.convert_sync_batchnorm(self.model)
            elif self._layer_sync is not None:
                self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=0)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        self._unwrap_optimizers()
        super().setup_optimizers(trainer)
        self.optimizers = [self._wrapped(optimizer) for optimizer in self.optimizers]

    def _wrapped(self, optimizer: Any) -> Any:
        name_of = {param: name for name, param in reversed(list(self.lightning_module.named_parameters()))}
        params = [param for entry in optimizer.param_groups for param in entry["params"]]
        if isinstance(optimizer, DistributedOptimizer) or not any(param in name_of for param in params):
            return optimizer  # Lightning's stand-in, where there is none, has no parameter of the module
        named = self.lightning_module.named_parameters() if all(param in name_of for param in params) else None
        return DistributedOptimizer(optimizer, named, **self._optimizer_arguments)

    def _unwrap_optimizers(self) -> None:
        """Removes hvdlite's hooks from the parameters, since the next ``fit`` makes new optimizers."""
        averaging = [optimizer for optimizer in self.optimizers if isinstance(optimizer, DistributedOptimizer)]
        for optimizer in averaging:
            optimizer.close()
        if averaging:
            self.optimizers = [each._optimizer if each in averaging else each for each in self.optimizers]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            broadcast_optimizer_state(optimizer, root_rank=0)

    def on_validation_start(self) -> None:
        self._send_buffers()

    def on_train_end(self) -> None:
        self._send_buffers()

    def _send_buffers(self) -> None:
        if buffers := list(self.lightning_module.named_buffers()):
            broadcast_parameters(buffers, root_rank=0)

    def teardown(self) -> None:
        self._unwrap_optimizers()
        _restore(self.lightning_module, self._batch_norms)
        self._batch_norms = {}
        if self._layer_sync is not None and not isinstance(self._layer_sync, _TorchSyncBatchNorm):
            self.model = self._layer_sync.revert(self.model)
        super().teardown()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes in it only add to the gradients; the next one outside averages the sum."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                if isinstance(optimizer, DistributedOptimizer):
                    stack.enter_context(optimizer.no_sync())
            yield

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Runs the closure's passes, averages, then runs Lightning's hooks and clipping, then steps."""
        if not isinstance(optimizer, DistributedOptimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def average_after() -> Any:
            result = closure()
            optimizer.synchronize()
            return result

        with ExitStack() as stack:
            if optimizer.op is not Adasum:  # with which there are no averages before the step
                stack.enter_context(optimizer.skip_synchronize())
            return super().optimizer_step(optimizer, average_after, model, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return broadcast_object(obj, root_rank=src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks, in place, and returns it. Anything else is returned as it is."""
        if not isinstance(tensor, Tensor):
            return tensor
        op = _OPS.get(str(reduce_op).rpartition(".")[2].lower())
        if op is None:
            raise ValueError(f"reduce_op={shown(reduce_op)} is none of mean, sum, min, max and product")
        if group not in (None, dist.group.WORLD):
            raise ValueError("HvdliteStrategy reduces over all ranks: leave out sync_dist_group")
        with torch.no_grad():
            if op is Average and not (tensor.is_floating_point() or tensor.is_complex()):
                # As Lightning's own strategies do, which Lightning and its users ask for means of counts.
                total = allreduce(tensor.to(torch.int64), op=Sum)
                return tensor.copy_(total.div_(size(), rounding_mode="trunc"))
            return tensor.copy_(allreduce(tensor, op=op))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks, of shape ``(size, *shape)``. ``sync_grads`` sends gradients back."""
        if size() == 1:
            return (tensor if sync_grads else tensor.detach()).unsqueeze(0)
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)
        return gathered


def _check_arguments(given: dict[str, Any]) -> None:
    """Raises a TypeError for what is no argument of `DistributedOptimizer`, or is the strategy's to decide."""
    decided = {
        "optimizer": "optimizers are those of configure_optimizers",
        "named_parameters": "parameters have the names that they have in the module",
        "backward_passes_per_step": "use Trainer(accumulate_grad_batches=...)",
        "step_on_arrival": "Lightning's hooks run between the averages and the step",
    }
    known = inspect.signature(DistributedOptimizer).parameters
    for name in given:
        if name in decided:
            raise TypeError(f"HvdliteStrategy(): {name} cannot be given: {decided[name]}")
        if name not in known:
            raise TypeError(f"HvdliteStrategy(): {name!r} is no argument of it, nor of hvd.DistributedOptimizer")


def _restore(model: torch.nn.Module | None, layers: dict[str, _BatchNorm]) -> None:
    """Puts layers back in the places of those that synchronize, with the tensors that these have by now."""
    for name, layer in layers.items():
        assert model is not None, "its layers have been replaced"
        parent, _, attribute = name.rpartition(".")
        synchronizing = model.get_submodule(name)
        layer._parameters, layer._buffers = synchronizing._parameters, synchronizing._buffers
        layer.train(synchronizing.training)
        setattr(model.get_submodule(parent), attribute, layer)


if "hvdlite" not in _registry.available_strategies():
    HvdliteStrategy.register_strategies(_registry)
