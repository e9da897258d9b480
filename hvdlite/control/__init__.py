"""
How ranks come to do the same at the same time: they ask, rank 0 gives all of them one order, or tells them why not.

    Request ── Controller (ControlClient ── Coordinator ── Negotiation; Executor) ── Execution ── Handle

Modules import only what stands before them:

    handle < request < controller < mismatch < executor < in_order < frames < handshake < mailbox < labels < pending
        < stall < joined steps < callers < whereabouts < heartbeat < endings < negotiation < words < door < coordinator
        < client < connect
"""
