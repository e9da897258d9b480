"""One job while it runs: the loop that decides when it ends, what is shown of it, and what is said of a failure.

    events ── supervisor (init_calls, failure_message) ── screen, output_files, launcher_stdin

Modules import only what stands before them:

    failure_message < output_files < screen < launcher_stdin < init_calls < supervisor < launch
"""
