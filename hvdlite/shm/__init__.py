"""
Collectives between ranks of one host, through memory that they share: the engine `hvdshm`.

    Segment (this rank's memory, and the others' as it is seen here)
        └── Board (who is how far, and with what) ── Crew (all boards; waiting) ── Turn (one operation's place)
              └── operations as generators ── Queue (who carries them on) ── Engine ── ProcessGroup, Channels

Modules import only what stands before them:

    futex < segment < board < crew < arithmetic < turn < reductions < exchanges < work < queue < engine < meeting
          < channels < backend
"""
