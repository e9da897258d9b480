"""What a child process of a program under the shim finds as `horovod`: it makes way for `hvdlite.horovod`."""

import sys

import hvdlite.horovod

hvdlite.horovod.install()
sys.modules[__name__] = hvdlite.horovod
