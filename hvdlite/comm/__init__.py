"""
Ranks that communicate together, and what carries it: groups over `torch.distributed`'s engines.

    EngineFactory ── Engine ── Group ── Work; what happens when goes to a Recorder

Modules import only what stands before them:

    gloo < flat_bytes < admission < torch_engine < engine < hierarchy < gpu_clock < recorder < reduce_op < work
        < reducer_registry < deferred_close < group < engine_selection
"""
