"""
A differential fuzzer: random training programs on several ranks, beside one process on the whole batch.

    draw(seed) ── Program ── source ── ranks (threads) ── Record of each step ──┐
                         └── Truth (one process) ───────────────────────────────┴── judge ── Finding ── shrink ── source

`program` has what a program is, as plain data. `drawing` makes one from a seed. `source` writes it as Python, which is
what the ranks run and what a report shows. `truth` interprets the same data in one process. `judge` compares both after
every step. `shrinking` leaves away what a failure does not need. `campaign` runs many seeds; `python -m fuzz`, from
tests/, is its command line.
"""
