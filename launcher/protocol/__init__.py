"""The messages between the launcher, its agents and the workers, and the connection that carries them.

    worker ◄── hvdlite_wire.store_requests ──► agent ◄── messages and store_messages, over a channel ──► launcher

Modules import only what stands before them:

    store_messages < messages < channel
"""
