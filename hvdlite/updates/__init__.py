"""
How the wrapped optimizer's own step is taken, once averages are there: of all parameters, or of this rank's part alone.

    averages in param.grad ── clipping ── WholeUpdate    the optimizer's step, on every rank
                                       └─ ShardedUpdate  its step on this rank's pieces ── all-gather of the parameters
                                            └─ DividedState: which pieces are whose, and the state of this rank's

Modules import only what stands before them:

    update < pieces < divided_state < sharded_update
"""
