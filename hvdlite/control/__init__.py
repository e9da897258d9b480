"""
Negotiates operations between ranks: each rank sends its calls to rank 0, which answers all ranks in one order.

Rank 0 answers a call with a go once all ranks have made it, or with the reason why it is refused.

    Operation ── Controller (ControlClient ── Coordinator ── Negotiation; Executor) ── Execution ── Handle

`runtime.make_world` makes the controller with `connect`; `ops` and `optim` submit operations to it. The operations run
on `comm.group`.

Modules import only what stands before them:

    stragglers < reducer_registry < generation < handle < operation < controller < mismatch < executor <
        unchecked < frames < handshake < thread_labels < call_sites < messages < mailbox < pending < stall <
        joined_steps < callers < requests < joins < heartbeat < pace_reports < rank0_connection < voting <
        submission < endings < negotiation < incoming < acceptor < coordinator < control_client < connect
"""
