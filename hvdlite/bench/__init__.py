"""
`python -m hvdlite.bench`: how fast hvdlite is on this cluster, beside what else there is. Nothing imports it.

    command line ── who measures (`Ranks`) ── turns of the measured, in blocks ── samples ── Report: table, JSON, plot

What is claimed of speed comes from here: all that is compared runs in one process, taking turns, and is told as medians
with quartiles. Modules import only what stands before them, and any of the library besides:

    errors < quantities < setting < spread < table < plot < report < interruption < progress < ranks < turns
    < memory_left < allreduce < workloads < trainings < variants < step < usage < memory < prediction < calibration
    < outlook < scale < flags < command_line < run < __main__
"""
