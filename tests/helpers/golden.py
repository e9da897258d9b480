"""Plugin with the fixture `golden`: whole screens of output are compared with a text file beside the test.

With ``--write-golden`` the file is written anew, for ``git diff`` to show what has changed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write files of expected output as the output is")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Provides ``golden("screens.txt", text)``, which asserts that this is the text of the file."""

    def compare(name: str, text: str) -> None:
        file = request.path.with_name(name)
        if request.config.getoption("--write-golden"):
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8")

    return compare
