"""The messages between launcher, agents and workers, and their layout in bytes.

    worker ◄── worker_requests ──► agent ◄── messages, store_messages, in agent_frames ──► launcher

Modules import only what stands before them:

    worker_requests < store_messages < messages < agent_frames < channel
"""
