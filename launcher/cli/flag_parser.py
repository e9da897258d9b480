"""The flags of hvdlite-run: their names, the parsing of their values, and the help text.

`hvdlite_run`, `config_file` and `caller` call it. Flags of elastic jobs are in `elastic_flags`, those that only tune
the workers in `horovodrun_flags`. An error in a flag is a `UsageError`.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import UsageError
from . import elastic_flags, flag_values, horovodrun_flags

# Written by hand, since argparse's own texts differ between versions of Python.
HELP = f"""\
usage: hvdlite-run [-np N] [-H HOSTS | --hostfile FILE] [FLAG ...] [--] COMMAND [ARGUMENT ...]
       hvdlite-run --watch [PID]
       hvdlite-run --check [-H HOSTS | --hostfile FILE | --host-discovery-script COMMAND] [FLAG ...]

Run COMMAND in N worker processes, each with its own rank, and show their output. When one fails, the others are
ended, the end of its stderr is shown again, and hvdlite-run exits with its exit code.

  -np N, -n N, --num-proc N
                        number of workers; by default one for each slot of the hosts
  -H, --hosts HOSTS     hosts and their slots, such as node1:4,user@node2:4,[fd00::1]:4; without a number a host has
                        one slot, with auto one per GPU, or per core if it has no GPU. By default, this machine
  -hostfile, --hostfile FILE
                        the same from a file with one host per line: node1 slots=4
  --dry-run             print which rank would run where, with the variables set for it, and start nothing; of an
                        elastic job, its rules and its first workers, on the hosts that there are now
  -cb, --check, --check-build
                        start no workers; print a table of Python, torch, CUDA, NCCL, GPUs and hvdlite on each host,
                        the round-trip time between each two hosts, and how to mend what is wrong
  --output-filename DIR
                        also write each worker's output, unchanged, to DIR/rank.N/stdout and DIR/rank.N/stderr; in
                        an elastic job to DIR/worker.N
  --report-dir DIR      also write each report on what the ranks do to DIR/report-N.txt and DIR/report-N.json
  --metrics-textfile FILE
                        each 10 s and at the end, write the job's numbers to FILE, for Prometheus' node_exporter:
                        workers, faults, generation, and steps, memory, processor time and waits of each rank
  --summary FILE        at the end, write to FILE as JSON how the job has ended and why, what to do next, its
                        generations, losses, and each rank's steps and peak memory; if FILE ends in .html, as a page
                        with charts of the whole job
  --log-json FILE       also write each line of the workers' output, and each event of the job, to FILE, as one line
                        of JSON each
  --watch               on a terminal, show the job live below its output: hosts and ranks with their steps, memory,
                        processor and GPU use, and who holds up the others; elsewhere, a line about it each 10 s.
                        With a PID in place of COMMAND, or neither and one job, the job of that hvdlite-run, on this
                        machine. Without rich, a line each 10 s on a terminal too
  --ps                  start no workers; print the jobs that you run on this machine, with their hvdlite-run's PID
  --diagnose [PID]      start no workers; print as JSON all that --report finds out, with a verdict, and exit with 0 if
                        the job goes on, 3 if it stands still, 4 if nothing is known of it
  --report [PID]        start no workers; print what each rank of a running job does, and who waits for whom. PID is
                        the process number of its hvdlite-run, on this machine, if there are several. SIGQUIT
                        (Ctrl-\\) to that has it print the same, as it does when a rank waits for longer than the stall
                        warning's time
  --show-ranks RANKS    show the output of these ranks alone, such as 0,1, on the screen: files have that of all, and a
                        rank that fails first is shown at the end
  --local-ranks-filter RANKS
                        the same, by their ranks on each host
  -prefix-timestamp, --prefix-output-with-timestamp
                        begin each line of output with the time
  -x NAME[=VALUE]       set this variable for the workers, to VALUE or to the value it has here; may be repeated
  --no-env              do not pass the environment here to workers, except PATH, HOME, LD_LIBRARY_PATH, PYTHONHOME
                        and what -x names
  --horovod             import horovod finds hvdlite, in the workers and in programs that they start
  --debug-rank RANK     this rank waits in hvd.init() until a debugger is connected to it (debugpy, for VS Code and
                        others), and the others wait for it, without limit and without warnings
  --independent         the ranks are to train without each other: no warning at the end that they did
  -p, --ssh-port PORT   port of sshd on the hosts, if your ssh config does not set it
  -i, --ssh-identity-file FILE
                        private key for ssh
  --ssh-args ARGS       more arguments for ssh, quoted together after a = sign, as in "=-J jump"
  --ssh-program PROGRAM program to run instead of ssh, with a host and a command; it must pass stdin and stdout on
  --known-hosts         refuse a host whose key ssh does not know yet; by default the key of a host that is new is
                        accepted, also of one that a discovery script adds while nobody looks
  --remote-python PATH  Python with hvdlite on the other hosts; by default the path of the one here, else python3
  --network-interface, --network-interfaces NAME
                        network interface for the workers' traffic; by default the one that routes to the other
                        hosts. Of eth0,ib0 each host uses the first it has; per host: node1=eth0,node2=ib0. May be
                        repeated
  --start-timeout SECONDS
                        time for all hosts to answer, and for all ranks to be connected after the first hvd.init()
                        (HVDLITE_START_TIMEOUT or HOROVOD_START_TIMEOUT where it is set, else 60)
  --grace SECONDS       time for workers to end, for example to write a checkpoint, when hvdlite-run gets SIGTERM,
                        SIGHUP or Ctrl-C, before they are killed (30). When a worker fails it is 3 at most
  --config-file FILE    read flags from a YAML file, one per line: num-proc: 4. Flags given here have priority
  --verbose             print what is done: which rank runs where, its pid, signals sent, how tensors are sent
  -v, --version         print the version
  -h, --help            print this help

{elastic_flags.HELP}
{horovodrun_flags.HELP}
Standard input goes to rank 0. Flags after COMMAND belong to COMMAND. For example:

  hvdlite-run -np 4 python train.py --epochs 10
"""

EXAMPLE = "hvdlite-run -np 4 python train.py"
# As long as Slurm (KillWait) and Kubernetes give from SIGTERM to SIGKILL.
_GRACE_S = 30.0
# Flags of torchrun for the number of workers and their rendezvous, spelled with dashes.
_OF_TORCHRUN = frozenset(
    {
        *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--standalone"),
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    }
)
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# A flag's value where it is no word of a command line, all as text; None is a missing value.
Value = str | list[str | None] | Mapping[str, str | None] | None


class Parser(argparse.ArgumentParser):
    """Parses all flags. A new flag is added here and in `HELP`, or in `elastic_flags` or `horovodrun_flags`."""

    def __init__(self) -> None:
        super().__init__(prog="hvdlite-run", add_help=False, allow_abbrev=False)
        self.add_argument("-np", "-n", "--num-proc", type=flag_values.workers)
        self.add_argument("-H", "--hosts")
        self.add_argument("-hostfile", "--hostfile")
        self.add_argument("--dry-run", action="store_true")
        self.add_argument("-cb", "--check", "--check-build", action="store_true")
        self.add_argument("--output-filename")
        self.add_argument("--report-dir")
        self.add_argument("--metrics-textfile")
        self.add_argument("--summary")
        self.add_argument("--log-json")
        self.add_argument("--watch", action="store_true")
        self.add_argument("--ps", action="store_true")
        self.add_argument("--diagnose", nargs="?", const="")
        self.add_argument("--report", nargs="?", const="")
        self.add_argument("--show-ranks", type=flag_values.ranks)
        self.add_argument("--local-ranks-filter", type=flag_values.ranks)
        self.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
        self.add_argument("-x", action="append", default=[], dest="exports")
        self.add_argument("--no-env", action="store_true")
        self.add_argument("-p", "--ssh-port", type=flag_values.port)
        self.add_argument("-i", "--ssh-identity-file")
        self.add_argument("--ssh-args", type=_ssh_words, default=())
        self.add_argument("--ssh-program", default="ssh")
        self.add_argument("--known-hosts", action="store_true")
        self.add_argument("--remote-python")
        self.add_argument("--network-interface", "--network-interfaces", type=_interfaces, action=_Merge, default={})
        self.add_argument("--start-timeout", type=flag_values.positive_seconds)
        self.add_argument("--grace", type=flag_values.seconds, default=_GRACE_S)
        self.add_argument("--config-file")
        self.add_argument("--verbose", action="store_true")
        self.add_argument("-v", "--version", action="store_true")
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("--horovod", action="store_true")
        self.add_argument("--independent", action="store_true")
        self.add_argument("--debug-rank", type=flag_values.count, metavar="RANK")
        elastic_flags.add_flags(self)
        horovodrun_flags.add_flags(self)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        flag, _, why = message.partition(": ")
        if why == "expected one argument":
            message += f"; if it begins with a dash, write {flag.rpartition('/')[2]}=VALUE"
        elif why.startswith(f"{flag.lstrip('-').replace('-', '_')}="):
            message = why  # Horovod's message already names it
        raise UsageError(message)

    @property
    def flags(self) -> tuple[argparse.Action, ...]:
        return tuple(self._actions)

    def split_command(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the launcher's flags, and the command: from the first word that is no flag, or after ``--``."""
        values = {name: _count_values(flag) for flag in self.flags for name in flag.option_strings}
        optional = {name for flag in self.flags if flag.nargs == "?" for name in flag.option_strings}
        flags: list[str] = []
        i = 0
        while i < len(argv) and argv[i].startswith("-") and argv[i] != "--":
            flag = self._in_full(argv[i])
            after = i + 1 + values.get(flag, 0)
            if flag in optional and argv[i + 1 : after] and argv[i + 1].startswith("-"):
                after = i + 1
            flags += [flag, *argv[i + 1 : after]]
            i = after
        command = list(argv[i:])
        return flags, command[1:] if command[:1] == ["--"] else command

    def _in_full(self, word: str) -> str:
        """Returns the flag that ``word`` abbreviates, with its value after =, as argparse would; else ``word``.

        Done here, as the command begins after the last flag's value.
        """
        name, equals, value = word.partition("=")
        long = {known: flag for flag in self.flags for known in flag.option_strings if known.startswith("--")}
        if not name.startswith("--") or name in long:
            return word
        found = [known for known in long if known.startswith(name)]
        if any(long[known] is not long[found[0]] for known in found):
            raise UsageError(f"{name} may be {' or '.join(found)}: write it in full")
        return f"{found[0]}{equals}{value}" if found else word

    def flags_by_key(self) -> Mapping[str, argparse.Action]:
        """Returns every flag by its names without dashes. A name of one letter counts only if the flag has no other."""
        flags = {}
        for flag in self.flags:
            names = [name.lstrip("-") for name in flag.option_strings]
            flags.update({name: flag for name in names if len(name) > 1 or len(names) == 1})
        return flags | {"environment": flags["x"]}

    def words_for(self, flag: argparse.Action, value: Value) -> list[str]:
        """Returns the words that set ``flag`` to ``value``; a `UsageError` does not name the flag."""
        words = _words_that_say(flag, value, self._opposite(flag))
        if not all(map(_fits_on_a_command_line, words)):
            raise UsageError("it has a character that a command line cannot contain")
        try:
            self.parse_args(words)
        except UsageError as error:
            raise UsageError(str(error).removeprefix("/".join(flag.option_strings) + ": ")) from None
        return words

    def _opposite(self, switch: argparse.Action) -> argparse.Action | None:
        """Returns the switch with the contrary effect; None if leaving ``switch`` out has that effect."""
        same = (flag for flag in self.flags if flag.nargs == 0 and flag.dest == switch.dest)
        return next((flag for flag in same if flag.const != switch.const), None)

    def unknown_flag(self, flag: str) -> UsageError:
        name = flag.partition("=")[0]
        if name.replace("_", "-") in _OF_TORCHRUN:
            return UsageError(
                f"{name} is a flag of torchrun. Run hvdlite-run once, on one host: -np is the number of all workers, "
                "and -H names the hosts, such as: hvdlite-run -np 8 -H node1:4,node2:4 python train.py"
            )
        known = [option for action in self.flags for option in action.option_strings]
        return UsageError(f"unknown flag {name}; {closest(name, known)}. Flags of your program come after its name")


def _fits_on_a_command_line(word: str) -> bool:
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


def _count_values(flag: argparse.Action) -> int:
    return flag.nargs if isinstance(flag.nargs, int) else 1


def _words_that_say(flag: argparse.Action, value: Value, opposite: argparse.Action | None) -> list[str]:
    option = flag.option_strings[-1]
    repeated = isinstance(flag, argparse._AppendAction)
    if isinstance(value, Mapping) and repeated:
        if any("=" in name for name in value):
            raise UsageError("the name of a variable cannot contain =")
        return [f"{option}={name}" if text is None else f"{option}={name}={text}" for name, text in value.items()]
    values: Sequence[Value] = [value]
    is_comma_separated = flag.dest in ("hosts", "network_interface")
    if isinstance(value, list) and (repeated or is_comma_separated or _count_values(flag) > 1):
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
        raise UsageError("it has no value: give one, or leave it out")
    raise UsageError(f"it must be a single value, not a {'mapping' if isinstance(value, Mapping) else 'list'}")


def closest(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a user who wrote ``name``, which is not among the ``known`` names."""
    import difflib  # noqa: PLC0415  # only for this message

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "see hvdlite-run --help"


def _ssh_words(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be split into words: {str(error).lower()}") from None
    if broken := sorted({"-f", "-n", "-N", "-W", "-V", "-G", "-O", "-Q"}.intersection(words)):
        raise argparse.ArgumentTypeError(
            f"ssh {broken[0]} does not start a command with its stdin and stdout, as hvdlite-run needs: leave it out"
        )
    return words


def _interfaces(text: str) -> dict[str, str]:
    """Returns the interfaces by host, several separated by commas; the key "" is for all other hosts."""
    interfaces: dict[str, str] = {}
    for item in text.split(","):
        host, _, name = item.strip().rpartition("=")
        host = host.removeprefix("[").removesuffix("]")
        if not name:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not an interface: name one for all hosts, such as eth0, "
                "or one per host: node1=eth0,node2=ib0"
            )
        interfaces = _merged(interfaces, {host: name})
    return interfaces


def _merged(interfaces: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    joined = {host: f"{interfaces[host]},{names}" if host in interfaces else names for host, names in more.items()}
    return {**interfaces, **joined}


class _Merge(argparse.Action):
    def __call__(self, _parser: object, options: argparse.Namespace, values: Any, _option: object = None) -> None:
        setattr(options, self.dest, _merged(getattr(options, self.dest), values))
