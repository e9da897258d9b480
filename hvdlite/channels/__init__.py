"""
Ranks that communicate together, and what carries it: groups over `torch.distributed`'s engines.

    Channels ── Engine ── Group ── Work; what happens when goes to a Recorder

Modules import only what stands before them:

    gloo < engine < hierarchy < gpuwatch < recorder < reduce_op < flat < work < roster < collected < collective < choice
"""
