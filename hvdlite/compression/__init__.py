"""
Compressions whose wires can be summed: casts, Horovod's compressors, and users' own. `ops` and `optim` use them.

Modules import only what stands before them:

    kernels < horovod_compressors < custom < casts
"""
