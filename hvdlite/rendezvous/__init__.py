"""
Rendezvous: finds this process's ranks, and makes the ranks of a job known to each other through a store.

    launcher's variables ── Placement ── a shared store ── every rank's info ── addresses, for gloo and NCCL

Modules import only what stands before them:

    store_client < launcher_store < placement < launchers < secret < rank_info < process_state < master_address
        < host_address < nodelist < local_exchange < pmi < pmix < pmi_rendezvous
"""
