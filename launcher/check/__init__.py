"""``hvdlite-run --check``: asks all hosts whether a job could run there, judges the answers, and prints a table.

Modules import only what stands before them:

    ask_hosts < host_facts < diagnosis < check_table < run_check
"""
