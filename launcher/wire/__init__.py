"""The messages between the launcher, its agents and the workers, and their encoding as bytes.

    worker ◄── hvdlite_wire.store_requests ──► agent ◄── messages and store_messages, as agent_frames ──► launcher

Modules import only what stands before them:

    silent_links < store_messages < messages < agent_frames < channel
"""
