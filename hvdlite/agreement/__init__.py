"""
How ranks come to do the same at the same time: they ask, rank 0 gives all of them one order, or tells them why not.

    Request ── Conductor (Negotiator ── Coordinator ── Negotiation) ── Turn ── Handle

Modules import only what stands before them:

    handle < request < conductor < mismatch < in_order < mailbox < labels < pending < stall < sittings < callers
        < negotiation < coordinator < negotiator < connect
"""
