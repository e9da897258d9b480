"""
Collectives between ranks of one host, through memory that they share: the engine `hvdshm`.

    Segment (this rank's memory, and the others' as it is seen here)
        └── ControlBlock (who is how far, and with what) ── Peers (all control blocks; waiting) ── Operation (one operation's place)
              └── operations as generators ── Queue (who carries them on) ── Engine ── ProcessGroup, EngineFactory

Modules import only what stands before them:

    futex < segment < control block < peers < arithmetic < turn < reductions < exchanges < work < queue < engine < meeting
          < channels < backend
"""
