"""
What rank 0 runs beside its part as a rank: one thread that receives all ranks' messages, decides, and answers them.

    ranks ── Acceptor (once) ── Coordinator ── Negotiation ── outbox ── all ranks

Rank 0 answers a call with a go once all ranks have made it, or with the reason why it is refused. `control`
makes the coordinator.

Modules import only what stands before them:

    scene < deadlocks < stall < negotiation < stragglers < acceptor < coordinator
"""
