"""
Merges the recordings of all ranks into one timeline file, on a common clock.

`runtime.timeline_functions`, `runtime.bootstrap` and `runtime.world` call `session`. Each rank's events are recorded in
`comm.recorder`.

Modules import only what stands before them:

    clocks < parts < session
"""
