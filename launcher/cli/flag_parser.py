"""The flags of hvdlite-run: their names, how the value of each is read, and the help.

Those that only tune what runs are in `horovodrun_flags`. Whatever is wrong with one is a `UsageError`. What they make
happen is in `hvdlite_run` and what that calls.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import UsageError
from . import horovodrun_flags

# Written by hand: argparse words it differently from one Python to the next.
HELP = f"""\
usage: hvdlite-run [-np N] [-H HOSTS | --hostfile FILE] [FLAG ...] [--] COMMAND [ARGUMENT ...]
       hvdlite-run --check [-H HOSTS | --hostfile FILE] [FLAG ...]

Run COMMAND in N workers, each with a rank, and show what they print. When one fails, the others are ended,
its last words are shown again, and its exit code is hvdlite-run's.

  -np N, -n N, --num-proc N
                        how many workers; without it, one for each slot of the hosts
  -H, --hosts HOSTS     where they may run, as node1:4,user@node2:4,[fd00::1]:4; no number is one slot, auto as many
                        as the host has GPUs, else cores. Without it, this machine
  -hostfile, --hostfile FILE
                        the same from a file, a line for each host: node1 slots=4
  --dry-run             print which rank would run where, with the variables set for it, and start nothing
  -cb, --check, --check-build
                        run nothing; print a table of Python, torch, CUDA, NCCL, GPUs and hvdlite on each host, of how
                        long a round trip takes between each two, and what to do where something is amiss
  --output-filename DIR
                        what each worker writes also goes to DIR/rank.N/stdout and stderr, as it is
  -prefix-timestamp, --prefix-output-with-timestamp
                        begin each line that is shown with the time
  -x NAME[=VALUE]       give workers this variable, with the value it has here or this one; may be repeated
  --no-env              give them no other but PATH, HOME, LD_LIBRARY_PATH and PYTHONHOME, not all that are set here
  --horovod             let them, and what they start, find hvdlite where they import horovod
  -p, --ssh-port PORT   where sshd listens on the hosts, unless your ssh config says so
  -i, --ssh-identity-file FILE
                        the private key for them
  --ssh-args ARGS       further words for ssh, quoted as one and after a = sign, as in "=-J jump"
  --ssh-program PROGRAM what takes ssh's place: it is called with a host and a command, and passes on stdin
  --remote-python PATH  the Python on other hosts that has hvdlite, if not the one here or python3
  --network-interface, --network-interfaces NAME
                        what the workers talk over, if not what the hosts' routes say; of eth0,ib0 the first that a
                        host has; per host: node1=eth0,node2=ib0. May be repeated
  --start-timeout SECONDS
                        how long every host may take to answer, and after the first hvd.init() every rank to come to
                        it and be connected (HVDLITE_START_TIMEOUT or HOROVOD_START_TIMEOUT where it is set, else 60)
  --grace SECONDS       how long workers may take to end, say to write a checkpoint, after SIGTERM, SIGHUP or Ctrl-C to
                        hvdlite-run, before they are killed (30); after a failure of one of them it is 3 at most
  --config-file FILE    flags from a YAML file, a line for each: num-proc: 4. Those given here win
  --verbose             say what is done: which rank runs where, its pid, signals sent, how tensors travel
  -v, --version         print the version
  -h, --help            print this

{horovodrun_flags.HELP}
Standard input reaches rank 0. Flags after COMMAND are its own. For example:

  hvdlite-run -np 4 python train.py --epochs 10
"""

EXAMPLE = "hvdlite-run -np 4 python train.py"
# As long as Slurm (KillWait) and Kubernetes give from SIGTERM to SIGKILL.
_GRACE_S = 30.0
# The flags, by their dest, whose value is a list with commas between.
_COMMA_SEPARATED = frozenset({"hosts", "network_interface"})
# Those whose value is a text, and no number that could be written as one.
TEXTS = frozenset(
    {"hosts", "hostfile", "output_filename", "ssh_identity_file", "ssh_args", "ssh_program", "remote_python"}
    | {"network_interface", "config_file"}
) | frozenset(horovodrun_flags.TEXTS)
# What says to torchrun how many workers there are and where they meet, with dashes.
_OF_TORCHRUN = frozenset(
    {
        *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--standalone"),
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    }
)
_OTHER_KEYS = {"environment": "x"}
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# What is said of a flag where it is no word of a command line, all as text; None is a value that is not there.
Value = str | list[str | None] | Mapping[str, str | None] | None


class Parser(argparse.ArgumentParser):
    """Every flag; a new one is added here and in `HELP`, or in `horovodrun_flags`, and nowhere else."""

    def __init__(self) -> None:
        super().__init__(prog="hvdlite-run", add_help=False, allow_abbrev=False)
        self.add_argument("-np", "-n", "--num-proc", type=_positive)
        self.add_argument("-H", "--hosts")
        self.add_argument("-hostfile", "--hostfile")
        self.add_argument("--dry-run", action="store_true")
        self.add_argument("-cb", "--check", "--check-build", action="store_true")
        self.add_argument("--output-filename")
        self.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
        self.add_argument("-x", action="append", default=[], dest="exports")
        self.add_argument("--no-env", action="store_true")
        self.add_argument("-p", "--ssh-port", type=_port)
        self.add_argument("-i", "--ssh-identity-file")
        self.add_argument("--ssh-args", type=_ssh_words, default=())
        self.add_argument("--ssh-program", default="ssh")
        self.add_argument("--remote-python")
        self.add_argument("--network-interface", "--network-interfaces", type=_interfaces, action=_Merge, default={})
        self.add_argument("--start-timeout", type=positive_seconds)
        self.add_argument("--grace", type=_seconds, default=_GRACE_S)
        self.add_argument("--config-file")
        self.add_argument("--verbose", action="store_true")
        self.add_argument("-v", "--version", action="store_true")
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("--horovod", action="store_true")
        horovodrun_flags.add_flags(self)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        flag, _, why = message.partition(": ")
        if why == "expected one argument":
            message += ", after = if it begins with a dash"
        elif why.startswith(f"{flag.lstrip('-').replace('-', '_')}="):
            message = why  # Horovod's words name it
        raise UsageError(message)

    @property
    def flags(self) -> tuple[argparse.Action, ...]:
        return tuple(self._actions)

    def split_command(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """The launcher's own flags, and the command: from the first word that is no flag, or after ``--``."""
        values = {name: _count_values(flag) for flag in self.flags for name in flag.option_strings}
        i = 0
        while i < len(argv) and argv[i].startswith("-") and argv[i] != "--":
            i += 1 + values.get(argv[i], 0)
        flags, command = list(argv[:i]), list(argv[i:])
        return flags, command[1:] if command[:1] == ["--"] else command

    def flags_by_key(self) -> Mapping[str, argparse.Action]:
        """Every flag by its names without dashes; those of one letter only where there is no other."""
        flags = {}
        for flag in self.flags:
            names = [name.lstrip("-") for name in flag.option_strings]
            flags.update({name: flag for name in names if len(name) > 1 or len(names) == 1})
        return flags | {other: flags[key] for other, key in _OTHER_KEYS.items()}

    def words_for(self, flag: argparse.Action, value: Value) -> list[str]:
        """The words of a command line that say ``value`` of ``flag``; a `UsageError` does not name the flag."""
        words = _words_that_say(flag, value, self._opposite(flag))
        try:
            self.parse_args(words)
        except UsageError as error:
            raise UsageError(str(error).removeprefix("/".join(flag.option_strings) + ": ")) from None
        return words

    def _opposite(self, switch: argparse.Action) -> argparse.Action | None:
        """The switch that says the contrary; where there is none, not to give it does."""
        same = (flag for flag in self.flags if flag.nargs == 0 and flag.dest == switch.dest)
        return next((flag for flag in same if flag.const != switch.const), None)

    def unknown_flag(self, flag: str) -> UsageError:
        name = flag.partition("=")[0]
        if name.replace("_", "-") in _OF_TORCHRUN:
            return UsageError(
                f"{name} is torchrun's: hvdlite-run is typed once, on one host; -np says how many workers there are in "
                "all, and -H host:slots on which hosts: hvdlite-run -np 8 -H node1:4,node2:4 python train.py"
            )
        known = [option for action in self.flags for option in action.option_strings]
        return UsageError(f"unknown flag {name}; {closest(name, known)}")


def _count_values(flag: argparse.Action) -> int:
    return flag.nargs if isinstance(flag.nargs, int) else 1


def _words_that_say(flag: argparse.Action, value: Value, opposite: argparse.Action | None) -> list[str]:
    option = flag.option_strings[-1]
    repeated = isinstance(flag, argparse._AppendAction)
    if isinstance(value, Mapping) and repeated:
        if any("=" in name for name in value):
            raise UsageError("a name has no = in it")
        return [f"{option}={name}" if text is None else f"{option}={name}={text}" for name, text in value.items()]
    values: Sequence[Value] = [value]
    if isinstance(value, list) and (repeated or flag.dest in _COMMA_SEPARATED or _count_values(flag) > 1):
        values = value
    texts = [_single(each) for each in values]
    if flag.nargs == 0:
        if texts[0].lower() not in _SWITCH:
            raise UsageError(f"{texts[0]!r} is neither true nor false")
        contrary = [] if opposite is None else [opposite.option_strings[-1]]
        return [option] if _SWITCH[texts[0].lower()] else contrary
    if _count_values(flag) > 1:
        return [option, *texts]
    return [f"{option}={text}" for text in (texts if repeated else [",".join(texts)])]


def _single(value: Value) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise UsageError("it has no value; give it one, or leave it out")
    raise UsageError(f"it must be a single value, not a {'mapping' if isinstance(value, Mapping) else 'list'}")


def closest(name: str, known: Iterable[str]) -> str:
    """What to say to who wrote ``name``, which is not among the ``known``."""
    import difflib  # noqa: PLC0415  # only for this message

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "see hvdlite-run --help"


def _positive(text: str) -> int:
    # Not int() alone: it takes " 4_0 ", and a number that no machine can run.
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 6 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers, such as 4")
    return int(text)


def _seconds(text: str) -> float:
    seconds = horovodrun_flags.decimal(text)
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to a day, such as 10")
    return seconds


def positive_seconds(text: str) -> float:
    if seconds := _seconds(text):
        return seconds
    raise argparse.ArgumentTypeError(f"{text!r} leaves no time at all; give it more than 0 seconds, such as 60")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, such as 22")
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be split into words: {str(error).lower()}") from None


def _ssh_words(text: str) -> tuple[str, ...]:
    words = _words(text)
    if broken := sorted({"-f", "-n", "-N", "-W", "-V", "-G", "-O", "-Q"}.intersection(words)):
        raise argparse.ArgumentTypeError(f"with {broken[0]} ssh would not pass on what hvdlite-run says to the host")
    return words


def _interfaces(text: str) -> dict[str, str]:
    """By host, several with commas between; those of "" are for all that are not named."""
    interfaces: dict[str, str] = {}
    for item in text.split(","):
        host, _, name = item.strip().rpartition("=")
        host = host.removeprefix("[").removesuffix("]")
        if not name:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not an interface for all hosts, such as eth0, or one for each: node1=eth0,node2=ib0"
            )
        interfaces = _merged(interfaces, {host: name})
    return interfaces


def _merged(interfaces: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    joined = {host: f"{interfaces[host]},{names}" if host in interfaces else names for host, names in more.items()}
    return {**interfaces, **joined}


class _Merge(argparse.Action):
    def __call__(self, _parser: object, options: argparse.Namespace, values: Any, _option: object = None) -> None:
        setattr(options, self.dest, _merged(getattr(options, self.dest), values))
