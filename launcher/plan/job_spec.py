"""`JobSpec`: a job as the command line describes it. `cli.hvdlite_run` creates it and `job.launch` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .elastic_spec import ElasticSpec, RestartSpec
from .exported_variables import WorkerEnvironment
from .hosts import Host
from .ssh import Ssh


@dataclass(frozen=True)
class JobSpec:
    """A job: its command, hosts and options.

    ``size`` None fills all slots; ``hosts`` may have `AUTO` slots, which only they can count. ``in_python``: the
    command holds arguments for the Python interpreter of each host's agent. ``as_horovod``: ``import horovod``
    finds hvdlite in workers. ``interfaces`` are the network interfaces by the hosts' labels, with "" for all other
    hosts; of several, separated by commas, a host uses the first that it has. ``timestamps``: shown lines begin
    with the time. ``show_ranks`` and ``show_local_ranks``: the ranks whose output is shown; None for all.
    ``record_dir`` is the directory for each worker's output, if it is written to files, and ``report_dir`` the one
    for reports. ``metrics_file`` is the file for Prometheus, ``summary_file`` the one that is written at the end,
    and ``log_json`` the one for output and events. ``watch``: the job is shown live. ``attempt`` counts the
    restarts before. ``elastic`` is None for a job whose ranks stay the same; where a discovery script finds them,
    ``hosts`` is empty. ``restart`` is None for a job that ends with its first failure.
    """

    hosts: tuple[Host, ...]
    size: int | None
    command: tuple[str, ...]
    cwd: str
    environment: WorkerEnvironment
    grace_s: float
    start_timeout_s: float
    ssh: Ssh = field(default_factory=Ssh)
    interfaces: Mapping[str, str] = field(default_factory=dict)
    verbose: bool = False
    timestamps: bool = False
    show_ranks: frozenset[int] | None = None
    show_local_ranks: frozenset[int] | None = None
    record_dir: str | None = None
    report_dir: str | None = None
    metrics_file: str | None = None
    summary_file: str | None = None
    log_json: str | None = None
    watch: bool = False
    attempt: int = 0
    in_python: bool = False
    as_horovod: bool = False
    elastic: ElasticSpec | None = None
    restart: RestartSpec | None = None

    def interface_of(self, host: Host) -> str | None:
        """Returns the network interface that the user chose for a host; None if its routes decide."""
        named = (self.interfaces.get(name) for name in (host.label, host.name, ""))
        return next(filter(None, named), None)
