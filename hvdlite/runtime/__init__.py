"""
`init`, `shutdown`, process sets, and the other public functions about the ranks themselves.

`ops` and `optim` get the current world and its groups from here. It calls `rendezvous` to find the other ranks, `comm`
and `shm` to connect to them, and `control` for the controller.

Modules import only what stands before them:

    process_set < departure < tracebacks < survival < hang_report < make_world < connect_ranks < bootstrap < world
        < functions
"""
