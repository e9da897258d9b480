"""
How the ranks of a job come to know each other: where this process stands, and where the others are to be found.

    launcher's variables ── Placement ── a store that all ranks share ── introductions ── addresses, for gloo and NCCL

Modules import only what stands before them:

    store_client < launcher_store < placement < launchers < secret < introductions < master_address < host_address
        < nodelist < neighbours < pmi < pmix < mpi_rendezvous
"""
