"""
What happened when, on all ranks: from each rank's recording to one file on one clock.

What is noted is with those who do it; where it is noted, in `comm.recorder`.

Modules import only what stands before them:

    clocks < parts < session
"""
