"""The program hvdlite-run: from its command line to its exit code, and one line for what cannot be done.

What the user may say is in `flags`, and what happens then in `job`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from .environment import chosen_environment
from .errors import LauncherError, UsageError
from .flags import EXAMPLE, HELP, Parser
from .hostfile import read_hostfile
from .hosts import Host, count_auto_slots, only_this_machine, parse_hosts
from .machine import loopback_interface, slots_by_hardware, usable_cores
from .plan import Slot, job_dir, plan_slots
from .preview import preview


def main(argv: Sequence[str] | None = None) -> int:
    """Run hvdlite-run with these arguments and give its exit code."""
    _open_standard_streams()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # who read a plan has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except LauncherError as error:
        print(f"hvdlite-run: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the job handles it
        return 130


def _run(argv: Sequence[str]) -> int:
    parser = Parser()
    flags, command = parser.split_command(argv)
    options, unknown = parser.parse_known_args(flags)
    if options.help:
        print(HELP, end="")
        return 0
    if options.version:
        print(f"hvdlite-run {_version()}")
        return 0
    if unknown:
        raise parser.unknown_flag(unknown[0])
    hosts = _hosts(options)
    if not command and not options.dry_run:
        raise UsageError(f"no command to run; it follows the flags, such as: {EXAMPLE}")
    slots = plan_slots(hosts, options.num_proc)
    environment = chosen_environment(os.environ, options.exports, inherit=not options.no_env)
    if options.dry_run:
        print(_preview(slots, environment), end="", flush=True)
        return 0

    from .job import run_job  # noqa: PLC0415  # so that --help and wrong flags are answered at once

    return run_job(
        slots,
        command,
        environment=environment,
        grace=options.grace,
        verbose=options.verbose,
        timestamps=options.prefix_output_with_timestamp,
        record_dir=options.output_filename,
    )


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("-H and --hostfile both say where workers run; give one of them")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = read_hostfile(options.hostfile)
    elif options.num_proc is not None:
        hosts = (Host("localhost", options.num_proc),)
    else:
        raise UsageError(f"how many workers? Say -np N, such as: {EXAMPLE}")
    # Counted where they are, which so far is here.
    return only_this_machine(count_auto_slots(hosts, lambda _: slots_by_hardware()))


def _preview(slots: tuple[Slot, ...], environment: Mapping[str, str]) -> str:
    import tempfile  # noqa: PLC0415  # costs 10 ms, needless for a job

    directory = job_dir("<job>", tempfile.gettempdir())
    return preview(slots, environment, job_dir=directory, cores=usable_cores(), loopback=loopback_interface())


def _version() -> str:
    from importlib import metadata  # noqa: PLC0415  # costs 20 ms, needless for a job

    try:
        return metadata.version("hvdlite")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _open_standard_streams() -> None:
    """Where the caller closed one (``>&-``), have /dev/null there: no pipe of ours may take its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
