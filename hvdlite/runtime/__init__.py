"""
The world and its process sets: how a process becomes one of the ranks, and how it leaves.

Modules import only what stands before them:

    process_set < process_set_registry < departure < tracebacks < startup_line < bootstrap < world
        < process_set_functions < built < timeline_functions
"""
