"""
Merges the recordings of all ranks into one timeline file, on one clock.

Events are noted by the code that causes them, through `comm.recorder`.

Modules import only what stands before them:

    clocks < parts < session
"""
