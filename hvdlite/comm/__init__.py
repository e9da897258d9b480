"""
Groups of ranks, their collectives, and the engines underneath: gloo, NCCL, and hierarchical ones.

    EngineFactory ── Engine ── Group ── Work, which a Watch is told of; beside them a Recorder, for timelines

Modules import only what stands before them:

    gloo < flat_bytes < engine_state < torch_engine < engine < host_groups < hierarchy < gpu_clock < recorder
        < reduce_op < work < deferred_close < group < engine_selection
"""
