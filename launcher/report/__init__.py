"""The report on a job that stands still: what each rank does, who waits for whom, and what is probably the cause.

    hvdlite-run --report, SIGQUIT, Stalled ──► Reports ── TakeReport ──► agents
                                                 ◄── Reported: JSON about each worker
    RankFacts of each rank ──► find_cause ──► report_text ──► screen, --report-dir, who has asked

`supervisor` calls `Reports`, and `cli` the client in `console`. Modules import only what stands before them:

    rank_facts < silent_links < causes < report_text < reports < other_networks < console
"""
