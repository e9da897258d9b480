"""
What hvdlite and hvdlite-run must agree on, and what both need of the system.

    worker (hvdlite) ── store_requests ──► agent (hvdlite_launcher) ── RankAssignment ──► worker

`hvdlite` and `hvdlite_launcher` import it. It imports the standard library alone, and psutil on use.
Modules import only what stands before them:

    codec < worker_status < store_requests < safe_paths < linux < job_contract
"""
