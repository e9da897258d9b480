"""
Negotiates operations between ranks: they ask, and rank 0 answers all in one order, or with the reason of a refusal.

    Operation ── Controller (ControlClient ── Coordinator ── Negotiation; Executor) ── Execution ── Handle

Modules import only what stands before them:

    reducer_registry < generation < handle < operation < controller < mismatch < executor < unchecked < frames
        < handshake < mailbox < thread_labels < pending < stall < joined_steps < callers < call_sites < heartbeat
        < endings < voting < negotiation < incoming < acceptor < coordinator < control_client < connect
"""
