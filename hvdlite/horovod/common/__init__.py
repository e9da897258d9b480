"""`horovod.common`: the modules that Horovod's frameworks share."""

from . import basics, exceptions, process_sets, util  # noqa: F401  # programs reach for them without importing them
