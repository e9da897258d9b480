"""
Compressions whose wires can be summed: casts, Horovod's compressors, and users' own; and codecs, whose wires cannot.
`ops` and `optim` use them.

Modules import only what stands before them:

    kernels < codec_kernels < custom < codecs < approximations < casts
"""
