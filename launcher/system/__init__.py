"""The machine that a part of the launcher runs on: terminals, files, signals, processes, hardware and network.

Used on the launcher's machine and on the workers' hosts alike. Modules import only what stands before them:

    terminal_text < user_file < safe_files < signals < process_tree < machine < job_directory < network
"""
