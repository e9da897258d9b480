"""
`DistributedOptimizer`: averages gradients over ranks while backward runs.

    optimizer ── reducer ── buckets ── an exchange ── averages ── the wrapped optimizer's step

Modules import only what stands before them:

    own_engine < surplus < reducer < autotune < arguments < optimizer_proxy < optimizer_state < averaging_optimizer
        < optimizer < checkpoint
"""
