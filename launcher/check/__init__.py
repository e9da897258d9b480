"""``hvdlite-run --check``: asks all hosts whether a job could run there, and prints the answers as tables.

`cli` calls `run_check`, which asks by means of `agents`.

Modules import only what stands before them:

    host_facts < diagnosis < run_check
"""
