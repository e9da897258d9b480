"""
Collectives between ranks of one host, through memory that they share: the engine `hvdshm`.

    Segment (this rank's memory, and the others' as it is seen here)
        └── ControlBlock (who is how far, and with what) ── Peers (all of them; waiting) ── ShmOperation (one call)
              └── collectives as generators ── Queue (who carries them on) ── Engine ── ProcessGroup, EngineFactory

Modules import only what stands before them:

    futex < segment < control_block < board < peers < arithmetic < shm_operation < reductions < data_movement < shm_work
        < queue < shm_engine < setup < shm_factory < backend
"""
