"""
From gradients to averages, inside an optimizer.

    optimizer ── reducer ── layout of buckets (plan) ── convoy of wires ── averages; deltas instead, for Adasum

Modules import only what stands before them:

    plan < bucket < sparse < layout < tracks < wire < convoy < params < tuning < probe < autotune < reducer < deltas
         < arguments < proxy < optimizer
"""
