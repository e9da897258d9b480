"""
`init`, `shutdown` and process sets: makes this process one of the ranks, and lets it leave.

Modules import only what stands before them:

    process_set < process_set_registry < departure < tracebacks < startup_line < bootstrap < world
        < process_set_functions < built < timeline_functions
"""
