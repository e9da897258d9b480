"""Has Horovod itself make the calls of `horovod_calls.py` with 1 to 4 ranks, and writes what came of them.

That is in `recorded.json`.

    python record.py        where `horovodrun` is Horovod's own, built with gloo

Recorded with Horovod 0.28.1 and PyTorch 2.13 on CPUs, Horovod compiled from its source archive with C++20 in place of
C++14, ``HOROVOD_WITH_GLOO=1`` and without MPI. Needed again when there is a call more.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import horovod.torch as hvd

SIZES = (1, 2, 3, 4)
HERE = Path(__file__).parent
FUNCTIONS = [
    name for name in dir(hvd) if inspect.isfunction(getattr(hvd, name)) and not name.startswith("_")
]  # fmt: skip


def run(size: int, path: str) -> list[dict[str, Any]]:
    """Returns the outcome of each call, by rank."""
    command = ["horovodrun", "--gloo", "-np", str(size), sys.executable, str(HERE / "horovod_calls.py"), path]
    subprocess.run(command, check=True, timeout=300)
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(size)]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        recorded = {size: run(size, f"{directory}/{size}") for size in SIZES}
    lines = []
    for name in recorded[1][0]:
        of_size = {size: [each[name] for each in ranks] for size, ranks in recorded.items()}
        # Once, if it is the same on all ranks.
        shared = {size: each[0] if all(other == each[0] for other in each) else each for size, each in of_size.items()}
        lines.append(f"{json.dumps(name)}: {json.dumps(shared, separators=(',', ':'))}")
    signatures = {name: list(inspect.signature(getattr(hvd, name)).parameters) for name in FUNCTIONS}
    (HERE / "recorded.json").write_text(
        '{"arguments": ' + json.dumps(signatures) + ',\n"calls": {\n' + ",\n".join(lines) + "\n}}\n"
    )


if __name__ == "__main__":
    main()
