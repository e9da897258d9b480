"""
The collectives as users call them, and what they are made of.

    operations, asynchronous ── submission ── combining (with reduction, adasum) or moving ── channels.collective

Modules import only what stands before them:

    kernels < codec < own < compression < travel < fusion < adasum < reduction < outcome < load < submission < combining
        < join < moving < asynchronous < autograd < operations < replicate < moments < batch_norm
"""
