"""
`python -m hvdlite.chaos`: runs hvdlite-run with faults in the workers, as `hvdlite-run --chaos` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_HELP = """\
usage: python -m hvdlite.chaos SPEC [SPEC ...] -- [FLAG ...] COMMAND [ARGUMENT ...]

Runs hvdlite-run --chaos SPEC FLAG ... COMMAND ...: an elastic job in which faults are caused, and reported at its end.
A SPEC is one fault, or seeded ones. For example:

  python -m hvdlite.chaos kill@vote:worker=1:step=7 -- -np 4 --min-np 2 --survive python train.py
  python -m hvdlite.chaos seed=3,every=20,count=10 -- -np 4 --min-np 2 --survive python train.py

docs/chaos.md, in the sources, has all kinds of faults and points. The flags are those of hvdlite-run --help.
"""
_USAGE = 2


def main(words: Sequence[str]) -> int:
    """Replaces this process by hvdlite-run; returns an exit code if there is nothing to run."""
    if list(words[:1]) in (["-h"], ["--help"]):
        print(_HELP, end="")
        return 0
    specs = list(words[: words.index("--")]) if "--" in words else []
    if not specs:
        print("hvdlite.chaos: say SPEC, then --, then the arguments of hvdlite-run; see --help", file=sys.stderr)
        return _USAGE
    flags = [f"--chaos={spec}" for spec in specs]
    arguments = [sys.executable, "-m", "hvdlite_launcher", *flags, *words[len(specs) + 1 :]]
    return os.execv(sys.executable, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
