"""What a job shows and writes: the workers' lines on the terminal, in files, and in a log of JSON.

    Output ──► job_screen ──► output_files, json_log
                 └──► held_tracebacks (what several ranks wrote, once) ──► lines ──► display ──► footer ──► terminal

Modules import only what stands before them:

    output_files < lines < json_log < footer < held_tracebacks < display < job_screen
"""
