"""Plans a job, what is run and where: hosts, slots, the environment of each worker, and how hosts are reached.

Nothing is started here. Modules import only what stands before them:

    hosts < slots < worker_environment < exported_variables < ssh < job_spec < dry_run
"""
