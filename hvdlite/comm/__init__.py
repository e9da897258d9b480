"""
Groups of ranks with their collectives, and the engines (gloo, NCCL, hierarchical) that run them.

An `EngineFactory` opens an `Engine` for each `Group`. A collective of the group starts an operation of the engine and
returns a `Work` to wait for. `CollectiveWatch` records which collectives this rank has begun and waits for. `Recorder`
writes this rank's events to its part of a timeline.

Modules import only what stands before them:

    ends < tcp < gloo_sockets < gloo < flat_bytes < deferred_close < engine < messages < torch_engine
        < torch_factory < hierarchy < recorder < reduce_op < step_clock < work < signed_call
        < group < hierarchy_selection
"""
