"""The launcher's side of the agents: starts one on each host, sends them commands, and receives their events.

`job.launch` and `check.run_check` use an `agent_group`, which has one `remote_agent` per host. Each of these starts a
`host.remote_parent`, here or by ssh, and puts what its agent sends into the event queue of the job. Until all agents
have answered or failed, `wait_for_agents` handles these events; after that `supervisor` does, or for ``--check``
`check.run_check`.

Modules import only what stands before them:

    connection_loop < remote_agent < wait_for_agents < agent_group
"""
