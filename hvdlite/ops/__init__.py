"""
The collectives as users call them, and what they are made of.

    operations ── allreduce, broadcast, ... (each a base.Collective) ── the controller ── comm.group

Modules import only what stands before them:

    sendable < adasum < reduction < failures < packing < base < rows < allgather_reducescatter < alltoall < allreduce
        < broadcast < operations < join < batch_norm
"""
