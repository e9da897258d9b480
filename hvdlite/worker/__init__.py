"""
The process of a worker: programs in forked processes, and functions that `hvdlite_launcher` runs.

    agent ── fork_server ── fork ── main_program ── program       `run` ── hvdlite_launcher ── functions ── function

Modules import only what stands before them:

    main_program < fork_server < functions
"""
