"""The command line of hvdlite-run: what the user may say, and one line for what cannot be done.

What happens then is in `job`.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from .environment import chosen_environment
from .errors import LauncherError, UsageError
from .hostfile import read_hostfile
from .hosts import Host, count_auto_slots, only_this_machine, parse_hosts
from .machine import loopback_interface, slots_by_hardware, usable_cores
from .plan import Slot, job_dir, plan_slots
from .preview import preview

# Written by hand: argparse words it differently from one Python to the next.
HELP = """\
usage: hvdlite-run [-np N] [-H HOSTS | --hostfile FILE] [FLAG ...] [--] COMMAND [ARGUMENT ...]

Run COMMAND in N workers, each with a rank, and show what they print. When one fails, the others are ended,
its last words are shown again, and its exit code is hvdlite-run's.

  -np N, --num-proc N   how many workers; without it, one for each slot of the hosts
  -H, --hosts HOSTS     where they may run, as host:slots,host:slots; so far only this machine: localhost:4.
                        localhost:auto is as many as it has GPUs, else cores. Without it, localhost:N
  -hostfile, --hostfile FILE
                        the same from a file, a line for each host: localhost slots=4
  --dry-run             print which rank would run where, with the variables set for it, and start nothing
  --output-filename DIR
                        what each worker writes also goes to DIR/rank.N/stdout and stderr, as it is
  -prefix-timestamp, --prefix-output-with-timestamp
                        begin each line that is shown with the time
  -x NAME[=VALUE]       give workers this variable, with the value it has here or this one; may be repeated
  --no-env              give them no other but PATH, HOME, LD_LIBRARY_PATH and PYTHONHOME, not all that are set here
  --grace SECONDS       how long workers may take to end after SIGTERM or Ctrl-C before they are killed (3)
  --verbose             say what is done: which rank runs where, its pid, signals sent
  --version             print the version
  -h, --help            print this

Standard input reaches rank 0. Flags after COMMAND are its own. For example:

  hvdlite-run -np 4 python train.py --epochs 10
"""

_WITH_VALUE = ("-np", "--num-proc", "-H", "--hosts", "-hostfile", "--hostfile", "--output-filename", "-x", "--grace")
_EXAMPLE = "hvdlite-run -np 4 python train.py"
# A worker's grace; with PEER_LOST_S in `supervise` it keeps a failed job's end below 5 s.
_GRACE_S = 3.0


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
    flags, command = split_command(argv)
    parser = _parser()
    options, unknown = parser.parse_known_args(flags)
    if options.help:
        print(HELP, end="")
        return 0
    if options.version:
        print(f"hvdlite-run {_version()}")
        return 0
    if unknown:
        raise UsageError(_unknown_flag(unknown[0], parser))
    hosts = _hosts(options)
    if not command and not options.dry_run:
        raise UsageError(f"no command to run; it follows the flags, such as: {_EXAMPLE}")
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
        raise UsageError(f"how many workers? Say -np N, such as: {_EXAMPLE}")
    # Counted where they are, which so far is here.
    return only_this_machine(count_auto_slots(hosts, lambda _: slots_by_hardware()))


def _preview(slots: tuple[Slot, ...], environment: Mapping[str, str]) -> str:
    import tempfile  # noqa: PLC0415  # costs 10 ms, needless for a job

    directory = job_dir("<job>", tempfile.gettempdir())
    return preview(slots, environment, job_dir=directory, cores=usable_cores(), loopback=loopback_interface())


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own flags, and the command: from the first word that is no flag, or after ``--``."""
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "--":
        i += 2 if argv[i] in _WITH_VALUE else 1
    flags, command = list(argv[:i]), list(argv[i:])
    return flags, command[1:] if command[:1] == ["--"] else command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _parser() -> _Parser:
    parser = _Parser(prog="hvdlite-run", add_help=False, allow_abbrev=False)
    parser.add_argument("-np", "--num-proc", type=_positive)
    parser.add_argument("-H", "--hosts")
    parser.add_argument("-hostfile", "--hostfile")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output-filename")
    parser.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
    parser.add_argument("-x", action="append", default=[], dest="exports")
    parser.add_argument("--no-env", action="store_true")
    parser.add_argument("--grace", type=_seconds, default=_GRACE_S)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def _positive(text: str) -> int:
    # Not int() alone: it takes " 4_0 ", and a number that no machine can run.
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 6 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers, such as 4")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to a day, such as 10")
    return seconds


def _unknown_flag(flag: str, parser: _Parser) -> str:
    import difflib  # noqa: PLC0415  # only for this message

    name = flag.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else "see hvdlite-run --help"
    return f"unknown flag {name}; {hint}"


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
