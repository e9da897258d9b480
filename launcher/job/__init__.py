"""One running job: the event loop that decides when it ends.

`cli` calls `launch`, which starts the job's `agents` and runs the `supervisor`; `attempts` starts a
failed job anew.

    events ──► supervisor ──► first_failure or elastic_job ──► ending ──► signals to workers by agents
                 └──► job_screen, standard input

Modules import only what stands before them:

    supervisor < launch < attempts
"""
