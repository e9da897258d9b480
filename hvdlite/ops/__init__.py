"""
The public collectives and their implementation, `join`, and batch normalization over all ranks.

    api ── allreduce, broadcast, ... (each a base.Collective) ── the controller ── comm.group

`hvdlite` exports the functions of `api`, `broadcast`, `join` and `batch_norm`; `optim` uses `reduction`.

Modules import only what stands before them:

    sendable < base < adasum < reduction < packing < rows < allreduce < broadcast < direct < typed_values < api < join
        < batch_norm
"""
