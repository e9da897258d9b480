"""
Runs random programs on ranks and in one process, and prints what differs, made small, as programs to run.

    cd tests && python -m fuzz --seeds 10000 --legs shm2,hosts3 --minutes 30
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))

from .campaign import run, smallest
from .judge import Finding
from .pool import LEGS
from .program import Program
from .source import runnable


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.strip().splitlines()[0])
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=300, help="how many, on each leg")
    parser.add_argument("--legs", default=",".join(LEGS), help=f"some of {', '.join(LEGS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="the time for all legs")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds that a program may take")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to make a failing program smaller")
    arguments = parser.parse_args()
    legs = [LEGS[name] for name in arguments.legs.split(",")]
    # Programs use what hvdlite and torch warn of.
    warnings.simplefilter("ignore")
    found = 0
    for leg in legs:

        def tell(program: Program, finding: Finding) -> None:
            print(f"\n=== {leg.name}, seed {program.seed}: {finding.kind}\n{finding.words}", flush=True)  # noqa: B023

        faulthandler.dump_traceback_later(60 * arguments.minutes + 600, exit=True)
        seeds = range(arguments.start, arguments.start + arguments.seeds)
        result = run(leg, seeds, 60 * arguments.minutes / len(legs), tell, arguments.deadline)
        for program, finding in result.findings.values():
            small, again = smallest(program, finding, leg, arguments.shrink)
            print(f"\n=== {leg.name}, seed {program.seed}, made small: {again.words}\n\n{runnable(small)}", flush=True)
        rate = result.programs / max(result.seconds, 1e-9)
        found += result.counts.total()
        print(
            f"{leg.name}: {result.programs} programs in {result.seconds:.0f} s ({rate:.1f} per second), of them "
            f"{result.refused} refused and {result.unsettled} not judged to the end; {result.counts.total()} findings "
            f"{dict(result.counts) or ''}",
            flush=True,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
