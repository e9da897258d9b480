"""`horovod.common.elastic`: the base classes of states, and `run_fn`, by which programs make a `run` of their own."""

from hvdlite.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
