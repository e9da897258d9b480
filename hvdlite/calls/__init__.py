"""
What ranks call together: operations and their handles, and the messages and words about them between a rank and rank 0.

    Operation ── Controller.submit ── ... rank 0 lets it begin on all ranks ... ── Execution ── Handle

Every rank uses this package, in `control`; rank 0 also in `coordinator`. The packages above make operations (`ops`,
`optim`), and know of `control` only the interface `Controller`.

Modules import only what stands before them:

    generation < handle < operation < mismatch < call_sites < messages < mailbox
"""
