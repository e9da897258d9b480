"""
From gradients to averages, inside an optimizer.

    optimizer ── reducer ── layout of buckets (plan) ── in flight: exchange over links ── averages

Modules import only what stands before them:

    plan < slot < flags < bucket < homes < layout < tracks < exchange < settings < strategies < in_flight < step_deltas
         < sameness < params < tuning < probe < autotune < reducer < arguments < proxy < optimizer_state < arrival
         < attributes < averaging < optimizer
"""
