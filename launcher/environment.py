"""Which of the launcher's environment goes to the workers, as ``-x`` and ``--no-env`` say.

What hvdlite-run itself sets for each of them is in `plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .errors import UsageError
from .plan import OWN_VARIABLES

# Without these a program may not be found, or not start: where commands are, where a Python's shared library
# and its standard library lie if not where it was built to look, and the home that many read at once.
_NEEDED = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONHOME")


def chosen_environment(environ: Mapping[str, str], exports: Iterable[str], *, inherit: bool) -> dict[str, str]:
    """All of ``environ`` or, unless workers ``inherit`` it, what they need to start; and what ``exports`` name.

    Each of these is ``NAME``, for the value in ``environ``, or ``NAME=VALUE``; of two the later counts.
    """
    chosen = {name: value for name, value in environ.items() if inherit or name in _NEEDED}
    for export in exports:
        # Values may be secret: no message repeats one.
        name, given, value = export.partition("=")
        if not name:
            raise UsageError("-x: there is no name before the value; say -x NAME=VALUE")
        if name in OWN_VARIABLES:
            raise UsageError(f"-x: {name} is hvdlite-run's own to set, for each worker")
        if not given and name not in environ:
            raise UsageError(f"-x: {name!r} is not set here; say -x NAME=VALUE to give it a value")
        chosen[name] = value if given else environ[name]
    return chosen
