"""What is known of a job's workers, the words for how one has failed, the one to blame, and how the others are ended.

Modules import only what stands before them:

    failure_message < ending < first_failure
"""
