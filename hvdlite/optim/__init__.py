"""
`DistributedOptimizer`: averages gradients over ranks while backward runs.

    optimizer ── reducer ── layout of buckets (plan) ── in flight: exchange over links ── averages

Modules import only what stands before them:

    plan < slot < flags < bucket < homes < layout < step_trace < exchange < settings < exchanges < sparse_gather
         < parameter_check < in_flight < step_deltas < gradient_hooks < autotune < reducer < arguments
         < optimizer_proxy < optimizer_state < step_by_bucket < horovod_attributes < averaging_optimizer < optimizer
"""
