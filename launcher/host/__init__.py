"""Programs that run on each host: the agent that starts the workers there, and its parent that clears up after it.

    sshd, or the launcher ── remote_parent ── agent ── start_workers, worker_stdin, worker_output

Modules import only what stands before them:

    start_workers < worker_stdin < worker_output < agent < remote_parent
"""
