"""
`DistributedOptimizer`: averages gradients over ranks while backward runs.

    optimizer ── reducer ── buckets ── an exchange ── averages ── the wrapped optimizer's step

Modules import only what stands before them:

    opening < own_engine < param_hooks < surplus < reducer < autotune < arguments < followed_groups
        < optimizer_proxy < fill_tensors < optimizer_state < step_by_bucket < state_pattern < averaging_optimizer
        < optimizer < checkpoint_file < checkpoint
"""
