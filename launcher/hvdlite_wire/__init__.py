"""
What hvdlite and hvdlite-run must agree on, and what both need of the system.

    worker (hvdlite) ── store_requests ──► agent (hvdlite_launcher) ── assignments ──► worker

`hvdlite` and `hvdlite_launcher` import it. It imports the standard library alone, and psutil on use.
Modules import only what stands before them:

    codec < field_types < worker_status < store_requests < assignments < safe_paths < addresses < processes
        < job_contract < fault_points
"""
