"""
Gradients in buckets: which gradient lies where, when a bucket is full, and what is sent for it.

    hook ── gradient_state ── layout (buckets, as `plan` lays them out) ── in_flight (an exchange) ── averages

`steps.gradient_plan` owns one `Layout` and one queue of exchanges in flight. `exchange` is what `exchanges` implement;
`settings` has what users choose.

Modules import only what stands before them:

    plan < gradient_state < flags < shares < bucket < layout < step_trace < exchange < settings < parameter_check
        < in_flight
"""
