"""The main program of hvdlite-run: from its command line to its exit code.

`flag_parser` parses the flags, `job_of` makes a `JobSpec` of them, and `job.attempts` runs it; ``--check`` and
``--dry-run`` run `check` and `plan.dry_run` instead. `function_runner` uses `read_flags` and `job_of` too. Errors of
the user are one line on stderr.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from ..errors import LauncherError, UsageError
from ..plan.hosts import Host, find_this_machine, given_hosts, parse_hosts, plan_slots, read_hostfile
from ..plan.job_spec import JobSpec
from ..plan.ssh import Ssh
from ..plan.worker_environment import chosen_environment
from ..system.terminal_text import say, write
from ..version import VERSION
from . import elastic_flags, horovodrun_flags
from .flag_parser import EXAMPLE, HELP, Parser
from .flag_values import positive_seconds

_START_TIMEOUT_S = 60.0
# Of --diagnose, by the verdict; 1 and 2 are those of errors.
_EXIT_CODES = {"goes on": 0, "stands still": 3, "not known": 4}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs hvdlite-run with these arguments and returns its exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except LauncherError as error:
        say(str(error))
        return error.exit_code


def _run(argv: Sequence[str]) -> int:
    flags, command = Parser().split_command(argv)
    options = read_flags(flags)
    if options.help:
        write(HELP)
        return 0
    if options.version:
        write(f"hvdlite-run {VERSION}\n")
        return 0
    if (asked := _asked_of_running_jobs(options, command)) is not None:
        return _show_running_jobs(asked, options, command)
    if options.check:
        if command:
            raise UsageError(f"--check runs no command: leave out {command[0]!r}, and what follows it")
        from ..check.run_check import check  # noqa: PLC0415  # as below

        return check(_job_to_check(options))
    job = job_of(options, command)
    horovodrun_flags.say_what_has_no_effect(options)
    if options.dry_run:
        write(_dry_run(job, options))
        return 0
    if not command:
        raise UsageError(f"no command to run: put it after the flags, such as: {EXAMPLE}")

    from ..job.attempts import run_attempts  # noqa: PLC0415  # so that --help and wrong flags are answered at once

    return run_attempts(job).exit_code


def _given(options: argparse.Namespace) -> list[argparse.Action]:
    """Returns the flags that have another value than by default."""
    return [flag for flag in Parser().flags if getattr(options, flag.dest) != flag.default]


def _asked_of_running_jobs(options: argparse.Namespace, command: Sequence[str]) -> str | None:
    given = {"--ps": options.ps, "--report": options.report is not None, "--diagnose": options.diagnose is not None}
    # A command is never a number alone.
    is_number = len(command) == 1 and command[0].isdecimal()
    is_alone = not command and all(flag.dest == "watch" for flag in _given(options))
    given["--watch"] = options.watch and (is_number or is_alone)
    flags = [flag for flag, is_given in given.items() if is_given]
    if len(flags) > 1:
        raise UsageError(f"{flags[0]} and {flags[1]} ask for different things: give only one of them")
    return flags[0] if flags else None


def _show_running_jobs(asked: str, options: argparse.Namespace, command: Sequence[str]) -> int:
    for flag in _given(options):
        if asked not in flag.option_strings:
            raise UsageError(f"{asked} of a running job starts none: leave out {'/'.join(flag.option_strings)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a job says of itself may have characters that the encoding of this terminal or file lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    from ..status.console import ask_for_report, table_of_jobs, the_one_job  # noqa: PLC0415  # seldom needed

    if asked == "--watch":
        from .watch_job import watch_job  # noqa: PLC0415  # seldom needed

        return watch_job(command[0] if command else the_one_job(asked))
    if command:
        raise UsageError(f"{asked} starts no command: leave out {command[0]!r}, and what follows it")
    if options.ps:
        write(f"{table_of_jobs()}\n")
        return 0
    if options.report is not None:
        write(f"{ask_for_report(options.report or the_one_job(asked))[0]}\n")
        return 0
    _, data = ask_for_report(options.diagnose or the_one_job(asked), "--diagnose")
    write(f"{json.dumps(data, indent=1)}\n")
    return _EXIT_CODES.get(str(data["verdict"]), 1)


def read_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Parses these words, and the config file if they name one."""
    parser = Parser()
    options, unknown = parser.parse_known_args(flags)
    if options.help or options.version:
        return options
    if unknown:
        raise parser.unknown_flag(unknown[0])
    if options.config_file is None:
        return options
    return parser.parse_args([*_words_of_config_file(options, parser), *flags])


def job_of(options: argparse.Namespace, command: Sequence[str]) -> JobSpec:
    """Returns the job that these options ask for; raises `UsageError` for what this host can see to be wrong."""
    is_elastic = elastic_flags.is_elastic(options)
    starts_elastic = is_elastic and not options.check
    hosts = find_this_machine(_hosts(options, is_elastic=is_elastic))
    names = {"", *(host.label for host in hosts), *(host.name for host in hosts)}
    if hosts and (strangers := options.network_interface.keys() - names):
        raise UsageError(f"--network-interface: {min(strangers)!r} is not one of the hosts")
    exports = [*(f"{name}={value}" for name, value in _variables(options).items()), *options.exports]
    identity_file = options.ssh_identity_file
    if identity_file is not None and not os.path.isfile(identity_file):
        raise UsageError(f"-i: there is no file {identity_file!r}")
    if options.show_ranks is not None and options.local_ranks_filter is not None:
        raise UsageError("--show-ranks and --local-ranks-filter each say whose output is shown: give one of them")
    if options.local_ranks_filter is not None and is_elastic:
        raise UsageError("--local-ranks-filter: ranks change in an elastic job: give --show-ranks in its place")
    if options.debug_rank is not None and is_elastic:
        raise UsageError(
            "--debug-rank: in an elastic job a rank that a debugger holds would be taken for lost: leave out --min-np "
            "and all other flags of elastic jobs"
        )
    if options.known_hosts and os.path.basename(options.ssh_program) != "ssh":
        raise UsageError(f"--known-hosts is for ssh, which knows hosts by their keys: {options.ssh_program!r} need not")
    return JobSpec(
        hosts=hosts,
        size=options.num_proc,
        command=tuple(command),
        cwd=_working_directory(),
        environment=chosen_environment(os.environ, exports, inherit=not options.no_env),
        grace_s=options.grace,
        start_timeout_s=options.start_timeout or _seconds_set("START_TIMEOUT") or _START_TIMEOUT_S,
        ssh=Ssh(
            port=options.ssh_port,
            identity_file=identity_file,
            args=options.ssh_args,
            program=options.ssh_program,
            remote_python=options.remote_python,
            known_hosts=options.known_hosts,
        ),
        interfaces=options.network_interface,
        verbose=options.verbose,
        timestamps=options.prefix_output_with_timestamp,
        show_ranks=options.show_ranks,
        show_local_ranks=options.local_ranks_filter,
        record_dir=options.output_filename,
        report_dir=_absolute(options.report_dir),
        metrics_file=_absolute(options.metrics_textfile),
        summary_file=_absolute(options.summary),
        log_json=_absolute(options.log_json),
        watch=options.watch,
        as_horovod=options.horovod,
        elastic=elastic_flags.elastic_of(options, hosts, _seconds_set("ELASTIC_TIMEOUT")) if starts_elastic else None,
        restart=elastic_flags.restart_of(options),
    )


def _variables(options: argparse.Namespace) -> dict[str, str]:
    # Rank 0 writes how the ranks are connected, which the launcher does not know.
    own = {"HVDLITE_VERBOSE": "1"} if options.verbose else {}
    if options.survive:
        own["HVDLITE_SURVIVE"] = "1"
    if options.debug_rank is not None:
        own["HVDLITE_DEBUG_RANK"] = str(options.debug_rank)
    if options.independent:
        own["HVDLITE_INDEPENDENT"] = "1"
    return {**own, **horovodrun_flags.variables(options)}


def _seconds_set(variable: str) -> float | None:
    """Returns the value of hvdlite's environment variable, else of Horovod's; None if neither is set."""
    names = (f"HVDLITE_{variable}", f"HOROVOD_{variable}")
    name = next((name for name in names if os.environ.get(name, "").strip()), None)
    if name is None:
        return None
    try:
        return positive_seconds(os.environ[name].strip())
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from None


def _words_of_config_file(options: argparse.Namespace, parser: Parser) -> list[str]:
    from .config_file import config_words  # noqa: PLC0415  # seldom needed

    # Each of these flags chooses the hosts, so any one of them replaces all in the file.
    where = ("hosts", "hostfile", "host_discovery_script")
    said = any(getattr(options, dest) is not None for dest in where)
    # The interfaces are one list, which replaces the file's as a whole.
    interfaces = ("network_interface",) if options.network_interface else ()
    return config_words(options.config_file, parser, without=(*(where if said else ()), *interfaces))


def _hosts(options: argparse.Namespace, *, is_elastic: bool) -> tuple[Host, ...]:
    """Returns the hosts that the user names; none if they are to be discovered."""
    given = {"-H": options.hosts, "--hostfile": options.hostfile}
    given["--host-discovery-script"] = options.host_discovery_script
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{names[0]} and {names[1]} both name the hosts: give only one of them")
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    if options.host_discovery_script is not None:
        return ()
    if (given_here := given_hosts(os.environ)) is not None:
        variable, hosts = given_here
        say(f"hosts by {variable}: {', '.join(host.label for host in hosts)}")
        return hosts
    if is_elastic:
        return (Host("localhost", elastic_flags.slots_here(options)),)
    if options.num_proc is not None or options.check:
        return (Host("localhost", options.num_proc or 1),)
    raise UsageError(f"the number of workers is missing: give -np N, such as: {EXAMPLE}")


def _job_to_check(options: argparse.Namespace) -> JobSpec:
    """Returns the job with the hosts that are there now, if they are to be discovered."""
    job = job_of(options, ())
    if options.host_discovery_script is None:
        return job
    from ..elastic.discovery import discover  # noqa: PLC0415  # needless for --help and wrong flags

    hosts = discover(elastic_flags.script_of(options))
    if not hosts:
        raise UsageError(f"--host-discovery-script {options.host_discovery_script} prints no host now")
    return replace(job, hosts=hosts)


def _dry_run(job: JobSpec, options: argparse.Namespace) -> str:
    from ..elastic.discovery import discover  # noqa: PLC0415  # needless for --help and wrong flags
    from ..elastic.membership import Membership, StartWorker  # noqa: PLC0415
    from ..job.launch import count_slots  # noqa: PLC0415
    from ..plan.dry_run import dry_run, elastic_dry_run  # noqa: PLC0415

    by_flags = {name: job.environment.here[name] for name in _variables(options)}
    if job.elastic is None:
        return dry_run(job, plan_slots(count_slots(job), job.size), by_flags)
    found = count_slots(job) if job.elastic.discovery is None else discover(job.elastic.discovery)
    hosts = {host.label: host for host in found}
    actions = Membership(job.elastic.policy).hosts_found({host.label: host.slots for host in found}, now_s=0.0)
    starts = [each for each in actions if isinstance(each, StartWorker)]
    workers = [(start.worker, hosts[start.place.host], start.place.slot) for start in starts]
    return elastic_dry_run(job, found, workers, by_flags)


def _absolute(path: str | None) -> str | None:
    # Also "" stays what it is, and is refused.
    return os.path.abspath(path) if path else path


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory no longer exists: change to another one") from None
