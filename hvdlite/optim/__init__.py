"""
From gradients to averages, inside an optimizer.

    optimizer ── reducer ── layout of buckets (plan) ── in flight of wires ── averages; deltas instead, for Adasum

Modules import only what stands before them:

    plan < slot < flags < bucket < staying < scaling < sparse < layout < tracks < wires < wire < parcel < sameness
         < in flight < params < tuning < probe < autotune < reducer < deltas < arguments < proxy < optimizer_state
         < arrival < attributes < averaging < optimizer
"""
