"""
What every rank runs to make calls together: it sends its calls to rank 0, which answers all ranks in one order.

    Operation ── ControlClient ──► rank 0's `coordinator` ──► ControlClient ── Executor ── Handle

`runtime.make_world` makes the controller; `ops` and `optim` submit operations to it, which run on `comm.group`.

Modules import only what stands before them:

    executor < unchecked < rank0_connection < callers < voting < joins < requests < reports < control_client
"""
