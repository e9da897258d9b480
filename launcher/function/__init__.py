"""``hvdlite_launcher.run``: calls a Python function in many workers and returns what it returned there.

Modules import only what stands before them:

    function_messages < function_runner < caller
"""
