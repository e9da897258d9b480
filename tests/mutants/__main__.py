"""
Puts faults into a copy of the packages, one at a time, and says which test finds each, or that none does.

    cd tests && python -m mutants          all of them
    cd tests && python -m mutants 3 17     these, by their numbers
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .faults import MUTANTS
from .trial import TrialError, try_out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__.strip().splitlines()[0])
    parser.add_argument("numbers", nargs="*", type=int, help=f"0 to {len(MUTANTS) - 1}; all, if none is given")
    parser.add_argument("--tests", nargs="+", help="run these tests instead of those of the list")
    arguments = parser.parse_args()
    bad = 0
    for number in arguments.numbers or range(len(MUTANTS)):
        mutant = MUTANTS[number]
        try:
            with tempfile.TemporaryDirectory() as directory:
                verdict = try_out(mutant, arguments.tests or mutant.tests, Path(directory))
        except TrialError as error:
            bad += 1
            print(f"{number:2}  {mutant.name}: {error}", flush=True)
            continue
        bad += verdict.failed is None
        end = "SURVIVED" if verdict.failed is None else f"found by {verdict.failed}"
        print(f"{number:2}  {mutant.name} ({mutant.file}): {end}", flush=True)
    return 1 if bad else 0


sys.exit(main())
