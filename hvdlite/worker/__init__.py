"""
The process of a worker: programs in forked processes, and functions that `hvdlite_launcher` runs.

    agent ── fork_server ── fork ── forked_program ── program        `run` ── run_in_workers ── worker_main ── function

Modules import only what stands before them:

    forked_program < fork_server < run_in_workers < worker_main
"""
