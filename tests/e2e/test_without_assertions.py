"""Jobs whose Python leaves assertions out, as ``python -O`` does, and docstrings too, as ``-OO`` does."""

from __future__ import annotations

import sys
from pathlib import Path

import every_call
import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import pathlib, sys
import hvdlite as hvd, every_call
hvd.init()
# Its assertions are left out, so what must be right is looked at here.
every_call.run_all(pathlib.Path(sys.argv[1]))
for kind, options in [("plain", {}), ("sparse", {}), ("plain", {"step_on_arrival": True, "bucket_cap_mb": 1e-5})]:
    difference = every_call.train(kind, **options)
    if not difference < 1e-6:
        sys.exit(f"{kind} {options}: {difference} from one process on the whole batch")
if hvd.allreduce(every_call.ones(1), op=hvd.Sum).item() != 2:
    sys.exit("a sum is wrong")
print("all done", __debug__)
"""


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("flags", "environment"),
    # The variable is hvdlite-run's and its agents' too.
    [([], {"PYTHONOPTIMIZE": "2", "HVDLITE_SHM": "0"}), (["-O"], {})],
)
def test_programs_work_without_assertions(launch, tmp_path, flags, environment):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {"PYTHONPATH": str(Path(every_call.__file__).parent), **environment}
    code, out, err = launch("-np", "2", sys.executable, *flags, str(program), str(tmp_path), env=environment).ended()
    assert code == 0, err.decode()
    assert out.count(b"all done False") == 2
