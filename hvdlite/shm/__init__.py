"""
Collectives between the ranks of one host through shared memory: the engine `hvdshm`.

Each rank allocates shared memory in a `Segment`. Its `ControlBlock`, also in shared memory, shows the other ranks its
progress and its data, and `Peers` waits for theirs. Each collective call is a `ShmOperation`, whose steps are a
generator. `ShmEngine` submits the operations to a `Queue`, which runs them in order. `runtime.make_world` opens engines
with `ShmEngineFactory`; DDP uses an engine through the ProcessGroup in `backend`.

Modules import only what stands before them:

    segment < control_block < arithmetic < board < peers < shm_operation < collectives < queue < shm_engine < setup
        < backend
"""
