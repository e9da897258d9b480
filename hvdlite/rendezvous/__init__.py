"""
How the ranks of a job come to know each other: where this process stands, and where the others are to be found.

    launcher's variables ── Placement ── a shared store ── every rank's info ── addresses, for gloo and NCCL

Modules import only what stands before them:

    store_client < launcher_store < placement < launchers < secret < rank_info < process_state < master_address
        < host_address < nodelist < local_exchange < pmi < pmix < pmi_rendezvous
"""
