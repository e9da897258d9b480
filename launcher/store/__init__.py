"""The rendezvous store: keys and values by which workers find each other before they are connected.

    workers ── relay (a Unix socket and a copy on each host) ── server (in the launcher)

`host.agent` runs `relay` on each host; `agents.remote_agent` calls `server`.

Modules import only what stands before them:

    server < relay
"""
