"""What a job and its ranks are doing: for the live view, metrics, the summary, and reports on a job that stands still.

    agents ──► progress ──► job_facts ──► metrics, job_view ──► live_view, summary
    hvdlite-run --report, SIGQUIT, Stalled ──► Reports ── AskStatus ──► agents
                                                 ◄── StatusTold about each worker
    RankStatus of each rank ──► job_report ──► screen, --report-dir, who has asked

`progress` asks how far the workers are. `first_minute` says what a job waits for that has just been started. `console`
is the socket on which a running job is asked, and its client.

Modules import only what stands before them:

    rank_status < job_report < reports < progress < first_minute < job_facts < job_view < live_view < metrics < summary
        < console
"""
