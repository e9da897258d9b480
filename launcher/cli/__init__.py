"""The command line of hvdlite-run, with horovodrun's flags and configuration files; and `hvdlite_launcher.run`.

`hvdlite_run` makes a `plan` and calls `job` or `check`, or `watch_job`, which shows a job that runs. `caller` calls a
function in many workers: in the user's process, it starts a `function_runner`, which runs the job.

Modules import only what stands before them:

    flag_values < elastic_flags < horovodrun_flags < flag_parser < config_file < watch_job < hvdlite_run
        < caller < function_runner
"""
