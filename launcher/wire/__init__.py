"""What travels between launcher, agents and workers: the messages, and how they are laid out in bytes.

    worker ◄── worker_requests ──► agent ◄── messages, store_messages, in agent_frames ──► launcher

Modules import only what stands before them:

    worker_requests < store_messages < messages < agent_frames < channel
"""
