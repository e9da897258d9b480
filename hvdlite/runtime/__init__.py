"""
The world and its process sets: how a process becomes one of the ranks, and how it leaves.

Modules import only what stands before them:


"""
