"""`horovod.torch.elastic`: `run`, `TorchState` and `ElasticSampler`, from `hvdlite.elastic`."""

from hvdlite.elastic import ElasticSampler, ObjectState, State, TorchState, run

# Programs use hvd.elastic.state without importing it.
from . import sampler, state  # noqa: F401

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
