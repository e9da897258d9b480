"""`python -m hvdlite.horovod train.py`: installs the shim, then runs the program."""

import sys

from . import install
from .program import run_program

if __name__ == "__main__":
    install()
    run_program(sys.argv[1:])
