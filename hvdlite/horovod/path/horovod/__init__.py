"""The `horovod` that child processes of a program under the shim import: it replaces itself by `hvdlite.horovod`."""

import sys

import hvdlite.horovod

hvdlite.horovod.install()
sys.modules[__name__] = hvdlite.horovod
