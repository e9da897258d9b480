"""
Compressions whose wires can be summed: casts, Horovod's compressors, and users' own; and codecs, whose wires cannot.
`ops` and `optim` use them.

Modules import only what stands before them:

    cupy_program < kernels < codec_kernels < horovod_compressors < custom < codecs < low_rank < top_k < casts
"""
