"""The command line of hvdlite-run: its flags, those of horovodrun, configuration files, and the program itself.

Modules import only what stands before them:

    horovodrun_flags < flag_parser < config_file < hvdlite_run
"""
