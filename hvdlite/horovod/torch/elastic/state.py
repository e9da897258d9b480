"""`horovod.torch.elastic.state`: `TorchState`, and the handlers of what is given to it."""

from hvdlite.elastic import ElasticSampler, ObjectState, TorchState
from hvdlite.elastic.torch_state import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)

__all__ = [
    "ElasticSampler",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]
