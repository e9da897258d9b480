"""The programs that run on each host: the agent, which runs the workers, and its parent, which cleans up after it.

    sshd, or the launcher ── remote_parent ── agent ── worker_processes, forked_workers

The launcher (`agents.remote_agent`) starts a remote_parent on each host, itself or by ssh. That forks the agent, which
uses the other modules for the workers, and `protocol.channel` to talk to the launcher. They share its selector, in
which the data of each registration is a function without arguments, which the agent's loop calls.

Modules import only what stands before them:

    worker_processes < forked_workers < worker_hooks < nccl_view < collect < status_collector < agent < remote_parent

The workers themselves import `path/sitecustomize` at their start, and `worker_hooks` with torch.
"""
