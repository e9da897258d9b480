"""
The collectives as users call them, and what they are made of.

    operations, asynchronous ── submission ── combining (with reduction, adasum) or moving ── comm.group

Modules import only what stands before them:

    travel < fusion < adasum < reduction < outcome < load < submission < combining < join < moving < asynchronous
        < autograd < operations < replicate < moments < batch_norm
"""
