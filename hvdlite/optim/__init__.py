"""
`DistributedOptimizer`: averages gradients over ranks while backward runs.

    optimizer ── reducer ── layout (buckets, as `plan` lays them out) ── in_flight (an exchange over links) ── averages

Modules import only what stands before them:

    plan < gradient_state < kept_gradients < flags < weights < bucket < further_rounds < unbucketed_gradients < layout
        < step_trace < exchange < outer < settings < builtin_exchanges < stages < residuals < between_hosts < encoded
        < low_rank_exchange < top_k_exchange < exchange_choice < sparse_gather < parameter_check < outer_averages
        < outer_bucket < outer_steps < in_flight < step_deltas < opening < gradient_hooks < autotune < exchange_state
        < surviving_step < world_plan < reducer < arguments < optimizer_proxy < fill_tensors < optimizer_state
        < step_by_bucket < clipping < horovod_attributes < averaging_optimizer < optimizer
        < random_states < checkpoint_file < checkpoint
"""
