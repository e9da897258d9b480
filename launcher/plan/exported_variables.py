"""Chooses the variables that workers inherit, by ``-x`` and ``--no-env``, and leaves out those of other launchers.

A rank's place in an MPI job is left out everywhere; what belongs to one host, one login or another launcher's job on
other hosts. The variables of a launcher that is added to `hvdlite.rendezvous.launchers` are to be named here too.
What hvdlite-run itself sets for each worker is in `worker_environment`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import UsageError
from .worker_environment import OWN_VARIABLES

# Without these a program may not be found, or not start: where commands are, where a Python's shared library
# and its standard library lie if not where it was built to look, and the home that many read at once.
_NEEDED = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONHOME")

# What belongs to one host, one login or one place in another launcher's job. On another host it would be wrong, and
# workers there have that host's own.
_OF_ONE_HOST = re.compile(
    r"""
    HOME | USER | LOGNAME | MAIL | SHELL | SHLVL | PWD | OLDPWD | _ | BASH_FUNC_.*
    | HOST | HOSTNAME | HOSTTYPE | MACHTYPE | SSH_.* | KRB5CCNAME | GPG_.*
    | TMP | TEMP | TMPDIR | XDG_.* | DBUS_.* | SYSTEMD_.* | INVOCATION_ID | JOURNAL_STREAM
    | DISPLAY | XAUTHORITY | WAYLAND_DISPLAY | WINDOWID | TERM_.* | TMUX.* | STY | WINDOW | COLUMNS | LINES
    | (CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES | GPU_DEVICE_ORDINAL
    | OMPI_.* | MPIR_CVAR_CH3_INTERFACE_HOSTNAME | PMIX?_.* | PRTE_.* | HYDI?_.* | MPI_LOCAL.* | (SLURM|SLURMD)_.*
    | TORCHELASTIC_.* | ROLE_.* | GROUP_WORLD_SIZE
    """,
    re.VERBOSE,
)

# One rank's place in an MPI job. Workers have a place of their own; if they see such, they have started that job.
_OF_ONE_RANK = re.compile(r"OMPI_COMM_WORLD_.*|PMIX?_.*|MPI_LOCAL.*")


@dataclass(frozen=True)
class Environment:
    """What all workers get. ``elsewhere`` is for hosts other than the launcher's, in addition to their own."""

    here: Mapping[str, str]
    elsewhere: Mapping[str, str]


def chosen_environment(environ: Mapping[str, str], exports: Iterable[str], *, inherit: bool) -> Environment:
    """All of ``environ`` or, unless workers ``inherit`` it, what they need to start; and what ``exports`` name.

    Each of these is ``NAME``, for the value in ``environ``, or ``NAME=VALUE``; of two the later counts.
    """
    exported = dict(_read_export(export, environ) for export in exports)
    here = {
        name: value
        for name, value in environ.items()
        if (inherit and not _OF_ONE_RANK.fullmatch(name)) or name in _NEEDED
    }
    elsewhere = {name: value for name, value in here.items() if inherit and not _OF_ONE_HOST.fullmatch(name)}
    return Environment({**here, **exported}, {**elsewhere, **exported})


def _read_export(export: str, environ: Mapping[str, str]) -> tuple[str, str]:
    # Values may be secret: no message repeats one.
    name, given, value = export.partition("=")
    if not name:
        raise UsageError("-x: there is no name before the value; say -x NAME=VALUE")
    if name in OWN_VARIABLES:
        raise UsageError(f"-x: {name} is hvdlite-run's own to set, for each worker")
    if not given and name not in environ:
        raise UsageError(f"-x: {name!r} is not set here; say -x NAME=VALUE to give it a value")
    return name, value if given else environ[name]
