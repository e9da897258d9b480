"""
`python -m hvdlite.bench`: measures hvdlite on this cluster, and compares it with gloo or NCCL, DDP and Horovod.

    command line ── Command ── blocks that take turns on all Ranks ── samples ── BenchReport: table, JSON, plot

Figures of hvdlite's speed are measured here. The things compared take turns in one process, and are reported as medians
with quartiles. Modules import only those before them, and any of the library:

    arguments < ranks < report < training < allreduce < variants < namespaces < links < __main__
"""
