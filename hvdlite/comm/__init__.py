"""
Ranks that communicate together, and what carries it: groups over `torch.distributed`'s engines.

    EngineFactory ── Engine ── Group ── Work, which a Watch is told of; beside them a Recorder, for timelines

Modules import only what stands before them:

    gloo < flat_bytes < admission < torch_engine < engine < hierarchy < gpu_clock < recorder < reduce_op < work
        < deferred_close < group < engine_selection
"""
