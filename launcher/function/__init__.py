"""``hvdlite_launcher.run``: calls a Python function in many workers and returns what it returned there.

In the user's process, `caller` starts a `function_runner` process, which runs the job with `cli` and `job`.

Modules import only what stands before them:

    caller < function_runner
"""
