"""
Runs random programs on ranks and in one process, and prints what differs, made small, as programs to run.

    cd tests && python -m fuzz --seeds 10000 --legs shm2,hosts3 --minutes 30
"""

from __future__ import annotations

import argparse
import faulthandler
import mmap
import os
import struct
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))

from .campaign import run, smallest
from .drawing import draw_program
from .judge import Finding
from .pool import LEGS, Leg
from .program import Program
from .source import runnable


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.strip().splitlines()[0])
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=300, help="how many, on each leg")
    parser.add_argument("--legs", default=",".join(LEGS), help=f"some of {', '.join(LEGS)}")
    parser.add_argument("--shard", type=float, default=0.3, help="how many of the optimizers divide their work")
    parser.add_argument("--minutes", type=float, default=10.0, help="the time for all legs")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds that a program may take")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to make a failing program smaller")
    arguments = parser.parse_args()
    # Programs use what hvdlite and torch warn of.
    warnings.simplefilter("ignore")
    legs = [LEGS[name] for name in arguments.legs.split(",")]
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    found = [_run_all(leg, seeds, 60 * arguments.minutes / len(legs), arguments) for leg in legs]
    return 1 if any(found) else 0


def _run_all(leg: Leg, seeds: range, limit_s: float, arguments: argparse.Namespace) -> bool:
    """Runs a leg in a process of its own, and after a crash the rest in another; returns whether it found anything."""
    ends_at, found, under_way = time.monotonic() + limit_s, False, mmap.mmap(-1, 8)
    while seeds and time.monotonic() < ends_at:
        under_way[:] = struct.pack("q", seeds.start)
        # Nothing has started a thread here yet.
        child = os.fork()
        if child == 0:
            os._exit(_run(leg, seeds, ends_at - time.monotonic(), arguments, under_way))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found |= code != 0
        if code >= 0:
            break
        (seed,) = struct.unpack("q", under_way[:])
        print(f"\n=== {leg.name}, seed {seed}: signal {-code} ended the process\n", flush=True)
        print(runnable(draw_program(seed, leg.size, arguments.shard)), flush=True)
        seeds = range(seed + 1, seeds.stop)
    return found


def _run(leg: Leg, seeds: range, limit_s: float, arguments: argparse.Namespace, under_way: mmap.mmap) -> int:
    def tell(program: Program, finding: Finding) -> None:
        print(f"\n=== {leg.name}, seed {program.seed}: {finding.kind}\n{finding.words}", flush=True)

    def begins(seed: int) -> None:
        under_way[:] = struct.pack("q", seed)

    faulthandler.dump_traceback_later(limit_s + 600, exit=True)
    result = run(leg, seeds, limit_s, tell, arguments.deadline, begins=begins, shard=arguments.shard)
    for program, finding in result.findings.values():
        small, again = smallest(program, finding, leg, arguments.shrink)
        print(f"\n=== {leg.name}, seed {program.seed}, made small: {again.words}\n\n{runnable(small)}", flush=True)
    print(
        f"{leg.name}: {result.programs} programs in {result.seconds:.0f} s "
        f"({result.programs / max(result.seconds, 1e-9):.1f} per second), of them {result.refused} refused and "
        f"{result.unsettled} not judged to the end; {result.counts.total()} findings {dict(result.counts) or ''}",
        flush=True,
    )
    return 1 if result.counts else 0


if __name__ == "__main__":
    sys.exit(main())
