"""Chooses the variables that workers inherit, by ``-x`` and ``--no-env``, and leaves out other launchers' variables.

No worker gets the variables of one rank of an MPI job. Workers on other hosts also do not get variables that hold only
for this host, this login or another launcher's job. If you add a launcher to `hvdlite.rendezvous.launchers`, add its
variables to the patterns here. What hvdlite-run itself sets for each worker is in `worker_environment`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import UsageError
from .worker_environment import OWN_VARIABLES

# Without these a program may not be found or not start: the directories of commands, those of Python's shared library
# and standard library if they are not where it was built, and the home directory, which many programs read first.
_NEEDED = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONHOME")

# Variables of one host, one login or one rank of another launcher's job. They would be wrong on another host, where
# workers have that host's own.
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

# Variables of one rank of an MPI job. Workers must not inherit them, as they would seem to be ranks of that job.
_OF_ONE_RANK = re.compile(r"OMPI_COMM_WORLD_.*|PMIX?_.*|MPI_LOCAL.*")


@dataclass(frozen=True)
class WorkerEnvironment:
    """The environment that all workers get.

    ``elsewhere`` is for hosts other than the launcher's, in addition to their own environment.
    """

    here: Mapping[str, str]
    elsewhere: Mapping[str, str]


def chosen_environment(environ: Mapping[str, str], exports: Iterable[str], *, inherit: bool) -> WorkerEnvironment:
    """Returns the part of ``environ`` that workers get, with the variables in ``exports``.

    That part is all of it if they ``inherit`` it, else what they need to start. Each export is ``NAME``, for the value
    in ``environ``, or ``NAME=VALUE``; a later one replaces an earlier one of the same name.
    """
    exported = dict(_read_export(export, environ) for export in exports)
    here = {
        name: value
        for name, value in environ.items()
        if (inherit and not _OF_ONE_RANK.fullmatch(name)) or name in _NEEDED
    }
    elsewhere = {name: value for name, value in here.items() if inherit and not _OF_ONE_HOST.fullmatch(name)}
    return WorkerEnvironment({**here, **exported}, {**elsewhere, **exported})


def _read_export(export: str, environ: Mapping[str, str]) -> tuple[str, str]:
    # Values may be secret: no message contains one.
    name, given, value = export.partition("=")
    if not name:
        raise UsageError("-x: the name of the variable is missing: write -x NAME=VALUE")
    if name in OWN_VARIABLES:
        raise UsageError(f"-x: {name} cannot be set: hvdlite-run sets it for each worker")
    if not given and name not in environ:
        raise UsageError(f"-x: {name!r} is not set here: write -x NAME=VALUE to give it a value")
    return name, value if given else environ[name]
