"""
The public collectives and what they are built from, `join`, and batch normalization over all ranks.

    operations ── allreduce, broadcast, ... (each a base.Collective) ── the controller ── comm.group

Modules import only what stands before them:

    sendable < adasum < reduction < failures < packing < base < rows < allgather_reducescatter < alltoall < allreduce
        < broadcast < operations < join < batch_norm
"""
