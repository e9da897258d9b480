"""
How ranks come to do the same at the same time: they ask, rank 0 gives all of them one order, or tells them why not.

    Operation ── Controller (ControlClient ── Coordinator ── Negotiation; Executor) ── Execution ── Handle

Modules import only what stands before them:

    reducer_registry < generation < handle < operation < controller < mismatch < executor < unchecked < frames
        < handshake < mailbox < thread_labels < pending < stall < joined_steps < callers < call_sites < heartbeat
        < endings < voting < negotiation < incoming < acceptor < coordinator < control_client < connect
"""
