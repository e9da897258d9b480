"""The package that both halves share needs neither of them, and its modules import in one direction only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import hvdlite_wire

ROOT = Path(hvdlite_wire.__file__).parent
(BLOCK,) = [block for block in hvdlite_wire.__doc__.split("\n\n") if " < " in block]
ORDER = BLOCK.replace("<", " ").split()
# Imported only on use.
EXCEPTIONS = {"linux": {"psutil"}}


def test_every_module_has_its_place_and_imports_what_stands_before_it_and_the_standard_library():
    assert {path.stem for path in ROOT.rglob("*.py")} == {*ORDER, "__init__"}
    for place, name in enumerate(ORDER):
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.module in ORDER[:place], name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                needed = {module.partition(".")[0] for module in modules}
                assert needed <= sys.stdlib_module_names | EXCEPTIONS.get(name, set()), name


def test_importing_all_of_it_imports_neither_half():
    imports = "; ".join(f"import hvdlite_wire.{name}" for name in ORDER)
    program = (
        f"import sys; {imports}; assert not {{'hvdlite', 'hvdlite_launcher', 'torch', 'psutil'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


def test_it_is_in_the_wheel():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.findall(r'^    "(hvdlite_wire[^"]*)",$', pyproject, re.MULTILINE) == ["hvdlite_wire"]
