"""The one direction of imports, and what the launcher may need."""

import ast
import subprocess
import sys
from pathlib import Path

import hvdlite_launcher

ORDER = [
    *(
        "version",
        "errors",
        "words",
        "userfile",
        "request",
        "exchange",
        "messages",
        "protocol",
        "signals",
        "tree",
        "report",
        "machine",
    ),
    *(
        "network",
        "hosts",
        "hostfile",
        "jobdir",
        "plan",
        "environment",
        "preview",
        "channel",
        "ssh",
        "job",
        "store",
        "remote",
    ),
    *("gather", "agents", "workers", "feed", "outlets", "cache", "relay", "agent", "keeper", "newfile"),
    *(
        "record",
        "output",
        "stdin",
        "attendance",
        "supervise",
        "launch",
        "inquiry",
        "probe",
        "verdict",
        "table",
        "check",
    ),
    *("horovodrun", "flags", "configfile", "cli", "entry", "errand", "courier", "function"),
]
FILES = {path.stem: path for path in Path(hvdlite_launcher.__file__).parent.glob("*.py")}


def _imports(name):
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is None:
            yield from ((node.level, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module


def test_every_module_has_its_place():
    assert set(ORDER) == FILES.keys() - {"__init__", "__main__"}
    in_docstring = hvdlite_launcher.__doc__.partition("to their left:\n\n")[2].partition("\n\n")[0]
    assert in_docstring.replace(",", " ").replace("<", " ").split() == ORDER


def test_modules_import_only_what_lies_to_their_left():
    wrong = [
        f"{name} imports {module}"
        for place, name in enumerate(ORDER)
        for level, module in _imports(name)
        if level and module not in ORDER[:place]
    ]
    assert wrong == []


def test_the_launcher_needs_the_standard_library_and_psutil_alone():
    # Python reads no YAML, and pickles nothing of a notebook's. Both are imported only when that is asked for.
    exceptions = {"configfile": {"yaml"}, "function": {"cloudpickle"}}
    for name in FILES:
        needed = {module.partition(".")[0] for level, module in _imports(name) if not level}
        assert needed - sys.stdlib_module_names <= {"psutil"} | exceptions.get(name, set()), name


def test_a_plain_job_pays_for_neither_yaml_nor_pickling():
    program = "import sys, hvdlite_launcher.cli; assert not {'yaml', 'cloudpickle', 'pickle'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
