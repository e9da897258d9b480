"""
How the ranks of a job come to know each other: where this process stands, and where the others are to be found.

    launcher's variables ── Seat ── a store that all ranks share ── addresses, exchanged by gloo and NCCL

Modules import only what stands before them:

    client < store < topology < address < nodelist < neighbours < pmi < pmix < rendezvous
"""
