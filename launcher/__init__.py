"""hvdlite-run: starts one command on many slots, shows what it prints, ends it all when one part fails.

    cli ── hosts ── plan (slots → ranks, environment) ── one agent per host ── workers
                       supervise ◄── one queue of typed events ◄── agents, screen, signals

The modules import only what lies to their left:

    errors, protocol, signals, tree, report, machine, flags < hosts < hostfile < plan < preview < environment < remote
    < workers < feed < agent < record < output < stdin < supervise < job < cli

Nothing here imports torch or hvdlite: the launcher answers at once, and runs where torch is not installed.
What it shares with the library is the environment of a worker (see `plan`), not code.
"""
