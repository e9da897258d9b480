"""`horovod.common.process_sets`: the class and functions of process sets, from `hvdlite.torch`."""

from hvdlite.torch import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
