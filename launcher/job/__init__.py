"""One running job: the event loop that decides when it ends, its output and input, and its failure message.

`cli` and `function` call `launch`, which starts the job's `agents` and runs the `supervisor`:

    events ──► supervisor ──► first_failure (with init_calls) ──► ending ──► signals to workers by agents
                 └──► screen (with output_files), launcher_stdin

In an elastic job, `elastic_job` takes the place of `first_failure`: it carries out what `membership` decides, on hosts
that `discovery` finds and `elastic_hosts` connects to; workers read their ranks in `seats`, `hangs` finds those that no
longer respond, `cut_links` hosts that cannot reach each other and `refused_links` those that refuse each other, and
`generation_table` is shown at its end. With ``--chaos`` `chaos_job` stands before it, causes faults, and fills in a
`chaos_report`.

`first_minute` says what a job waits for that has just been started, and `late_start` has a report taken before a worker
that does not come ends it. `progress` asks how far the workers are;
`job_facts` has that and what became of the job, for what shows it (`metrics`, `summary`, `watch`). `job_view` is what
`watch` shows, and `live_view` draws it.
`held_tracebacks` finds a traceback that several ranks wrote, which the screen shows once.
`json_log` has output and events, by means of the screen. `trained_apart` warns of ranks that never met any other.

`roster` has what is known of each worker, `failure_message` words how one has failed.

Modules import only what stands before them:

    failure_message < roster < progress < output_files < lines < json_log < footer < held_tracebacks < screen
    < shown_ranks < launcher_stdin < ending < first_minute < late_start < init_calls < first_failure < discovery
    < host_slots < membership < elastic_hosts < generation_table < job_facts < job_view < live_view < watch < metrics
    < summary < log_events < trained_apart < seats < hangs < cut_links < refused_links < elastic_job < chaos_report
    < chaos_job < supervisor < launch < attempts
"""
