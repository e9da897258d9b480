"""Operating system services for the launcher: terminals, files, signals, processes, hardware and network.

Most other packages call them, on the launcher's machine and on the workers' hosts.

Modules import only what stands before them:

    terminal_text < user_files < process_tree < machine < job_directory < network
"""
