"""The `horovod` that a child process of a program under the shim imports: it hands over to `hvdlite.horovod`."""

import sys

import hvdlite.horovod

hvdlite.horovod.install()
sys.modules[__name__] = hvdlite.horovod
