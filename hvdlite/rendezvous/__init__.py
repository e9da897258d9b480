"""
Rendezvous: reads this process's rank from the launcher's variables, and connects all ranks to a shared store.

    launcher's variables ── Placement ── shared store ── every rank's signed RankInfo, read by all

`runtime` calls it in `hvd.init`, and then opens gloo and NCCL groups over the store.

Modules import only what stands before them:

    store_client < placement < launcher_store < launchers < elastic_store < rank_info < process_state
        < host_address < line_exchange < rank0_stores
"""
