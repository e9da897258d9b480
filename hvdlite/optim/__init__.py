"""
From gradients to averages, inside an optimizer.

    optimizer ── reducer ── layout of buckets (plan) ── buckets in flight (wire) ── averages; for Adasum, adasum_reducer

Modules import only what stands before them:

    plan < slot < flags < bucket < single_rank < scaling < sparse < layout < step_trace < wire_memory < wire < parcel
        < parameter_check < in_flight < gradient_hooks < tuning < probe < autotune < reducer < adasum_reducer
        < arguments < optimizer_proxy < optimizer_state < step_by_bucket < horovod_attributes
        < averaging_optimizer < optimizer
"""
