"""The rendezvous store, where workers find each other before they are connected.

    workers ── relay (a Unix socket) ── cache (a copy on each host) ── server (in the launcher)

Modules import only what stands before them:

    server < cache < relay
"""
