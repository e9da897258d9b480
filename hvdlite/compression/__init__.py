"""
Compresses gradients for the wire: casts, Horovod's compressors, and those of a user's own.

Modules import only what stands before them:

    kernels < horovod_compressors < custom < casts
"""
