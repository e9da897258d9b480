"""
Merges the recordings of all ranks into one timeline, on a common clock: one file, or one for each rank.

`runtime.functions`, `runtime.make_world` and `runtime.world` call `session`. Each rank's events are recorded
in `comm.recorder`.

Modules import only what stands before them:

    destination < session
"""
