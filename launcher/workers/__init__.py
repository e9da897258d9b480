"""What is known of a job's workers, and the words for their ends.

`roster` has what is known of each worker, `failure_message` words how one has failed, `first_failure` finds the one to
blame, and `ending` ends the others. `generation_table` is shown at the end of an elastic job; `trained_apart` warns of
ranks that never met any other. An `observer` is told of all events.

Modules import only what stands before them:

    observer < failure_message < roster < ending < first_failure < generation_table < trained_apart
"""
