"""`horovod.common`: the modules that Horovod has for all frameworks."""

from . import basics, elastic, exceptions, process_sets, util  # noqa: F401  # programs use them without importing them
