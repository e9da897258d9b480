"""python -m hvdlite.horovod train.py: the program, and `horovod` is there."""

import sys

from . import install
from .program import run_program

if __name__ == "__main__":
    install()
    run_program(sys.argv[1:])
