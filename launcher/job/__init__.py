"""One job while it runs: the loop that decides when it ends, what is shown of it, and the report on a failure.

    events ── supervisor (init_calls, report) ── screen, output_files, launcher_stdin

Modules import only what stands before them:

    report < output_files < screen < launcher_stdin < init_calls < supervisor < launch
"""
