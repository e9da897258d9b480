"""
What is sent for a bucket, and how ranks come to its average: in one all-reduce, between hosts, or with a codec.

    bucket ── exchange_state ── one Exchange ── begin (works on links) ── finish ── average

`steps.step_choice` makes one exchange for each optimizer and world. `sparse_gather` is for sparse gradients, which are
in no bucket.

Modules import only what stands before them:

    builtin_exchanges < stages < residuals < between_hosts < host_sums < low_rank_exchange < sparse_gather
        < exchange_state
"""
