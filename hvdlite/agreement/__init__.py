"""
How ranks come to do the same at the same time: they ask, rank 0 gives all of them one order, or tells them why not.

    Operation ── Conductor (Negotiator ── Coordinator ── Negotiation; Executor) ── Turn ── Handle

Modules import only what stands before them:

    handle < operation < conductor < mismatch < executor < in_order < frames < handshake < mailbox < labels < pending
        < stall < sittings < callers < whereabouts < vigil < endings < negotiation < words < door < coordinator
        < negotiator < connect
"""
