"""The command line of hvdlite-run: its own flags, horovodrun's flags, configuration files, and the main program.

`__main__` and `function` call `hvdlite_run`, which makes a `plan` and calls `job` or `check`. `watch_job` shows a
job that runs.

Modules import only what stands before them:

    flag_values < elastic_flags < horovodrun_flags < flag_parser < config_file < watch_job < hvdlite_run
"""
