"""
How ranks come to do the same at the same time: they ask, rank 0 gives all of them one order, or tells them why not.

    Request ── Conductor (Negotiator ── Coordinator ── Negotiation) ── Turn ── Handle

Modules import only what stands before them:

    handle < request < conductor < in_order < mailbox < mismatch < pending < stall < callers < negotiation
        < endings < coordinator < negotiator < connect
"""
