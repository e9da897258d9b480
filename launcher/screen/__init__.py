"""What a job shows and writes: the workers' lines on the terminal, in files, and in a log of JSON.

    Output ──► job_screen ──► output_records
                 └──► lines (what several ranks wrote, once) ──► display ──► terminal

Modules import only what stands before them:

    lines < output_records < display < job_screen
"""
