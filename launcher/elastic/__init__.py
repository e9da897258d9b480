"""Elastic jobs: which workers there are, on which hosts, and when they begin anew.

`elastic_job` takes the place of `first_failure`: it carries out what `membership` decides, on hosts that `discovery`
finds and `elastic_hosts` connects to; `rank_assignments` writes what the workers read. `hangs` finds those that no
longer respond, and hosts that cannot reach each other. With ``--chaos`` `job_faults` causes faults beside it, and
reports them.

Modules import only what stands before them:

    discovery < elastic_workers < membership < elastic_hosts < rank_assignments < hangs < elastic_job < job_faults
"""
