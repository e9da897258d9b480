"""Plans a job: its hosts and their slots, the environment of each worker, and the ssh commands to reach the hosts.

`cli` makes a `JobSpec` with it, which `job.launch` runs. `agents` and `host` call parts of it. Nothing is started here.

Modules import only what stands before them:

    hosts < worker_environment < python_command < ssh < chaos_spec < job_spec < dry_run
"""
