"""The program hvdlite-run: from its command line to its exit code, and one line for what cannot be done.

What the user may say is in `flag_parser`, and what happens then in `job_spec`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from ..errors import LauncherError, UsageError
from ..plan.dry_run import preview
from ..plan.exported_variables import chosen_environment
from ..plan.hosts import Host, find_this_machine, parse_hosts, read_hostfile
from ..plan.job_spec import JobSpec
from ..plan.slots import plan_slots
from ..plan.ssh import Ssh
from ..plan.worker_environment import HostEnvironment, job_dir
from ..system.machine import usable_cores
from ..system.network import loopback_interface
from ..system.terminal_text import say
from ..version import VERSION
from . import horovodrun_flags
from .flag_parser import EXAMPLE, HELP, Parser, positive_seconds

# What is said of the workers of a job, and not of its hosts.
_OF_WORKERS = ("num_proc", "dry_run", "output_filename", "prefix_output_with_timestamp", "grace", "horovod")

_START_TIMEOUT_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run hvdlite-run with these arguments and give its exit code."""
    _open_standard_streams()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # who read a plan has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except LauncherError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:  # before the job handles it
        return 130


def _run(argv: Sequence[str]) -> int:
    flags, command = Parser().split_command(argv)
    options = read_flags(flags)
    if options.help:
        print(HELP, end="")
        return 0
    if options.version:
        print(f"hvdlite-run {VERSION}")
        return 0
    if options.check:
        if command:
            raise UsageError(f"--check runs no command: leave out {command[0]!r}, and what follows it")
        from ..check.run_check import check  # noqa: PLC0415  # as below

        return check(job_of(options, command))
    job = job_of(options, command)
    say_what_has_no_effect(options)
    if options.dry_run:
        print(_preview(job, options), end="", flush=True)
        return 0
    if not command:
        raise UsageError(f"no command to run; it follows the flags, such as: {EXAMPLE}")

    from ..job.launch import launch  # noqa: PLC0415  # so that --help and wrong flags are answered at once

    return launch(job).exit_code


def read_flags(flags: Sequence[str]) -> argparse.Namespace:
    """What these words say, and the config file that they may name."""
    parser = Parser()
    options, unknown = parser.parse_known_args(flags)
    if options.help or options.version:
        return options
    if unknown:
        raise parser.unknown_flag(unknown[0])
    if options.check:
        _refuse_beside_check(options)
    if options.config_file is None:
        return options
    return parser.parse_args([*_words_of_config_file(options, parser), *flags])


def say_what_has_no_effect(options: argparse.Namespace) -> None:
    """A line on stderr for each flag of horovodrun's that has nothing to tune here."""
    for remark in horovodrun_flags.remarks(options):
        say(remark)


def _refuse_beside_check(options: argparse.Namespace) -> None:
    of_workers = _flags_of_workers()
    for flag in Parser().flags:
        if flag.dest in of_workers and getattr(options, flag.dest) != flag.default:
            raise UsageError(f"--check looks at hosts and starts no workers: leave out {'/'.join(flag.option_strings)}")


def _flags_of_workers() -> frozenset[str]:
    return frozenset(_OF_WORKERS).union(horovodrun_flags.DESTS)


def job_of(options: argparse.Namespace, command: Sequence[str]) -> JobSpec:
    """What is asked for, as far as it can be judged from here."""
    hosts = find_this_machine(_hosts(options))
    if strangers := options.network_interface.keys() - {
        "",
        *(host.label for host in hosts),
        *(host.name for host in hosts),
    }:
        raise UsageError(f"--network-interface: {min(strangers)!r} is none of the hosts")
    exports = [*(f"{name}={value}" for name, value in _variables(options).items()), *options.exports]
    identity_file = options.ssh_identity_file
    if identity_file is not None and not os.path.isfile(identity_file):
        raise UsageError(f"-i: there is no file {identity_file!r}")
    return JobSpec(
        hosts=hosts,
        size=options.num_proc,
        command=tuple(command),
        cwd=_working_directory(),
        environment=chosen_environment(os.environ, exports, inherit=not options.no_env),
        grace_s=options.grace,
        start_timeout_s=_start_timeout_s(options),
        ssh=Ssh(
            port=options.ssh_port,
            identity_file=identity_file,
            args=options.ssh_args,
            program=options.ssh_program,
            remote_python=options.remote_python,
        ),
        interfaces=options.network_interface,
        verbose=options.verbose,
        timestamps=options.prefix_output_with_timestamp,
        record_dir=options.output_filename,
        as_horovod=options.horovod,
    )


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """What flags set for the workers."""
    # Rank 0 says how its ranks are connected: nobody else knows.
    own = {"HVDLITE_VERBOSE": "1"} if options.verbose else {}
    return {**own, **horovodrun_flags.variables(options)}


def _start_timeout_s(options: argparse.Namespace) -> float:
    """What the flag says, or else the variable of this name, hvdlite's before Horovod's."""
    if options.start_timeout is not None:
        return float(options.start_timeout)
    names = ("HVDLITE_START_TIMEOUT", "HOROVOD_START_TIMEOUT")
    name = next((name for name in names if os.environ.get(name, "").strip()), None)
    if name is None:
        return _START_TIMEOUT_S
    try:
        return positive_seconds(os.environ[name].strip())
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from None


def _words_of_config_file(options: argparse.Namespace, parser: Parser) -> list[str]:
    from .config_file import config_words  # noqa: PLC0415  # seldom needed

    # Where workers run is one thing to say, in two ways: either takes the place of the file's.
    where = ("hosts", "hostfile")
    said = any(getattr(options, dest) is not None for dest in where)
    # Several of these are one list, which takes the place of the file's whole.
    interfaces = ("network_interface",) if options.network_interface else ()
    without = (*(where if said else ()), *interfaces, *(_flags_of_workers() if options.check else ()))
    return config_words(options.config_file, parser, without=without)


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("-H and --hostfile both say where workers run; give one of them")
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    if options.num_proc is not None or options.check:
        return (Host("localhost", options.num_proc or 1),)
    raise UsageError(f"how many workers? Say -np N, such as: {EXAMPLE}")


def _preview(job: JobSpec, options: argparse.Namespace) -> str:
    from ..system.job_directory import temporary_directory  # noqa: PLC0415  # costs 10 ms, needless for a job

    here = HostEnvironment(job_dir("<job>", temporary_directory()), usable_cores(), loopback_interface())

    from ..job.launch import count_slots  # noqa: PLC0415  # as above

    slots = plan_slots(count_slots(job), job.size)
    alone = len({slot.host for slot in slots}) == 1

    def interface_of(host: Host) -> str | None:
        names = job.interface_of(host)
        return f"<the first of {names} that is there>" if names and "," in names else names

    def facts_of(host: Host) -> HostEnvironment | None:
        if not (host.is_here and alone):
            return None
        return replace(here, interface=interface_of(host) or here.interface)

    by_flags = {name: job.environment.here[name] for name in _variables(options)}
    if job.as_horovod:
        by_flags["PYTHONPATH"] = "<where that host has hvdlite's horovod>, and what is in it else"
    return preview(slots, job.environment, facts_of, interface_of, by_flags)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory does not exist any more") from None


def _open_standard_streams() -> None:
    """Where the caller closed one (``>&-``), have /dev/null there: no pipe of ours may take its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
