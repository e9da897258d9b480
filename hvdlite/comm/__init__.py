"""
Groups of ranks with their collectives, and the engines (gloo, NCCL, hierarchical) that run them.

An `EngineFactory` opens an `Engine` for each `Group`. A collective of the group starts an operation of the engine and
returns a `Work` to wait for. `CollectiveWatch` records which collectives this rank has begun and waits for. `Recorder`
writes this rank's events to its part of a timeline.

Modules import only what stands before them:

    engine < step_clock < work < gloo_sockets < gloo < flat_bytes < deferred_close < messages < torch_engine
        < reduce_op < group < hierarchy < recorder
"""
