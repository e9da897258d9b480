"""A job as the command line describes it: what to run, where, and how. `launch` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .exported_variables import Environment
from .hosts import Host
from .ssh import Ssh


@dataclass(frozen=True)
class JobSpec:
    """A job: its command, hosts and options.

    ``size`` None fills all slots; ``hosts`` may have slots that only they can count. ``in_python``: the command is
    words for the Python of each host's agent. ``as_horovod``: workers find hvdlite where they import horovod.
    ``interfaces`` are by the hosts' labels; that of "" is for all others, and of several, with commas between, the
    first that a host has is meant. ``timestamps`` begin each line on the screen; ``record_dir`` is where each worker's
    output goes too.
    """

    hosts: tuple[Host, ...]
    size: int | None
    command: tuple[str, ...]
    cwd: str
    environment: Environment
    grace_s: float
    start_timeout_s: float
    ssh: Ssh = field(default_factory=Ssh)
    interfaces: Mapping[str, str] = field(default_factory=dict)
    verbose: bool = False
    timestamps: bool = False
    record_dir: str | None = None
    in_python: bool = False
    as_horovod: bool = False

    def interface_of(self, host: Host) -> str | None:
        """The network interface that the user wants there; None leaves it to the host's routes."""
        named = (self.interfaces.get(name) for name in (host.label, host.name, ""))
        return next(filter(None, named), None)
