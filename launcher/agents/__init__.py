"""The launcher's side of the agents: starts one on each host, greets them all, sends commands and receives events.

Modules import only what stands before them:

    remote_agent < wait_for_agents < agent_group
"""
