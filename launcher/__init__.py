"""hvdlite-run: starts one command on many slots, shows what it prints, ends it all when one part fails.

    cli ── hosts ── plan (slots → ranks, environment) ── one agent per host ── workers
                       supervise ◄── one queue of typed events ◄── agents, screen, signals
                           store ◄── each agent's relay ◄── workers that look for each other

The modules import only what lies to their left:

    version, errors, request, exchange, messages, protocol, signals, tree, report, machine, network < hosts
    < hostfile < plan < environment < preview < channel < ssh < job < store < remote < gather < agents < workers
    < feed < outlets < cache < relay < agent < keeper < record < output < stdin < attendance < supervise < launch
    < flags < cli

Nothing here imports torch or hvdlite: the launcher answers at once, and runs where torch is not installed.
What it shares with the library is the environment of a worker (see `plan`) and what a worker asks the store
(see `request`), not code.
"""
