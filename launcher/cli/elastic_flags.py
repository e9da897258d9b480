"""The flags of elastic jobs, and of jobs that are restarted: numbers of workers, hosts, and what follows a failure.

`flag_parser` adds them, and `hvdlite_run` makes the `ElasticSpec` or `RestartSpec` of a `JobSpec` with them. As with
horovodrun, --min-np and --host-discovery-script make a job elastic. So does --on-failure with replace, shrink or
blacklist. All other flags here need one of these.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Collection

from ..errors import UsageError
from ..plan.chaos_spec import ChaosSpec, parse_chaos, require_goes_on
from ..plan.hosts import AUTO, Host
from ..plan.job_spec import ON_FAILURE, DiscoveryScript, ElasticSpec, Policy, RestartSpec
from . import flag_values

HELP = """\
Flags of a job whose ranks may change while it runs, and of one that starts anew after a failure:

  --min-np, --min-num-proc N
                        elastic: go on with N workers or more. The job begins with -np workers or more; without -np,
                        with N or more
  --max-np, --max-num-proc N
                        use N workers at most; by default one for each slot of the hosts
  --host-discovery-script COMMAND
                        elastic: a command that prints the hosts, one in a line, as node1:4; it is run every second
  --slots-per-host, --slots N
                        the number of slots of hosts that it prints without one (1)
  --on-failure replace|shrink|blacklist|restart|stop
                        what follows a worker's failure. replace: a new worker starts in its slot; shrink: the slot
                        stays empty; blacklist: its host gets no workers for a while; restart: the whole command is
                        started again, for programs that are not elastic; stop: the job ends. The first three make a
                        job elastic. The default of an elastic job is replace, with --horovod blacklist
  --survive             elastic: the others finish the step in which a worker is lost, with the average of their own
                        gradients, and go on; also for programs without hvd.elastic.run
  --chaos SPEC          elastic: cause faults, to see how the job takes them, and report on each: one, as in
                        kill@vote:worker=1:step=7, or seeded ones, as in seed=3,every=20,faults=kill+segv,count=9 or
                        seed=3,every=30s (docs/chaos.md, in the sources, has all kinds and points); may be repeated
  --chaos-report FILE   write the report on these faults to FILE too, as JSON
  --max-restarts N      how many failures are followed by new workers: in each slot within 5 minutes; with restart, in
                        the whole job (3)
  --spares N            start N workers more than --max-np, which wait until one of the others is lost
  --no-fork-server      start each worker that replaces another as a new Python process, which imports torch. By
                        default it is a copy of one that has imported it, where the program cannot tell
  --elastic-timeout SECONDS
                        how long to wait for --min-np workers (HVDLITE_ELASTIC_TIMEOUT or HOROVOD_ELASTIC_TIMEOUT where
                        it is set, else 600)
  --hang-timeout SECONDS
                        end a worker that others wait for and that does not respond for so long, since its process is
                        stopped or a C extension holds the interpreter's lock (30; 0: never)
  --reset-limit N       end the job if its ranks change more than N times
  --blacklist-cooldown-range LOW HIGH
                        how many seconds a lost host gets no workers, and with blacklist one with a failed worker: LOW
                        after its first failure, twice as long after each further one, HIGH at most. By default, it
                        never gets any again
"""

_OF_RESTART, _OF_NONE = "restart", "stop"
_ELASTIC_ANSWERS = tuple(name for name, answer in ON_FAILURE.items() if answer.goes_on)
_ANSWERS = (*_ELASTIC_ANSWERS, _OF_RESTART, _OF_NONE)
# The dests of flags without effect in a job that is not elastic, such as max_np of --max-np. min_np is not one of them:
# a job that is restarted may shrink.
_OF_ELASTIC = (
    *("max_np", "slots_per_host", "spares", "survive", "chaos", "chaos_report", "no_fork_server"),
    *("elastic_timeout", "hang_timeout", "reset_limit", "blacklist_cooldown_range"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags to ``parser``; one that is not given is None."""
    parser.add_argument("--min-np", "--min-num-proc", type=flag_values.workers)
    parser.add_argument("--max-np", "--max-num-proc", type=flag_values.workers)
    parser.add_argument("--host-discovery-script", type=_command)
    parser.add_argument("--slots", "--slots-per-host", dest="slots_per_host", type=flag_values.workers)
    parser.add_argument("--on-failure", type=_answer)
    parser.add_argument("--max-restarts", type=flag_values.count)
    parser.add_argument("--spares", type=flag_values.count)
    parser.add_argument("--survive", action="store_const", const=True)
    parser.add_argument("--chaos", action="append")
    parser.add_argument("--chaos-report")
    parser.add_argument("--no-fork-server", action="store_const", const=True)
    parser.add_argument("--elastic-timeout", type=flag_values.positive_seconds)
    parser.add_argument("--hang-timeout", type=flag_values.seconds)
    parser.add_argument("--reset-limit", type=flag_values.count)
    parser.add_argument("--blacklist-cooldown-range", type=flag_values.seconds, nargs=2)


def is_elastic(options: argparse.Namespace) -> bool:
    """Returns whether the ranks of the job may change; raises `UsageError` for flags that contradict each other."""
    answer = options.on_failure
    if answer == _OF_RESTART:
        if options.host_discovery_script is not None:
            raise UsageError(
                "--on-failure restart starts a command anew on the hosts of -H or --hostfile that are left; "
                "with --host-discovery-script a job is elastic: leave one of them out"
            )
        _refuse_those_of_elastic(options, "--on-failure restart starts all workers anew")
        return False
    if answer in _ELASTIC_ANSWERS or options.min_np is not None or options.host_discovery_script is not None:
        return True
    _refuse_those_of_elastic(
        options, "the job's ranks do not change without --min-np, --host-discovery-script or --on-failure replace"
    )
    if options.max_restarts is not None:
        raise UsageError("--max-restarts: nothing is started anew; say --on-failure restart, or replace")
    return False


def restart_of(options: argparse.Namespace) -> RestartSpec | None:
    """Returns how often the job is to be started anew; None if its first failure ends it."""
    if options.on_failure != _OF_RESTART:
        return None
    least = options.min_np or options.num_proc or 1
    if options.num_proc is not None and least > options.num_proc:
        raise UsageError(f"--min-np {least} is more than -np {options.num_proc}")
    return RestartSpec(_max_restarts(options), least)


def elastic_of(options: argparse.Namespace, hosts: Collection[Host], timeout_s: float | None) -> ElasticSpec:
    """Returns what the flags of an elastic job ask for.

    ``hosts`` are those of -H or --hostfile, none if they are to be discovered. ``timeout_s`` is the value of the
    variable that stands for --elastic-timeout, if it is set.
    """
    policy = _policy(options, timeout_s)
    # Others start few workers later, or none, for which a process that waits would be too much.
    forks = policy.on_failure.replaces and options.no_fork_server is None
    hang_timeout_s = ElasticSpec.hang_timeout_s if options.hang_timeout is None else float(options.hang_timeout)
    is_discovered = options.host_discovery_script is not None
    if not is_discovered:
        if options.slots_per_host is not None:
            raise UsageError(
                "--slots-per-host is for hosts that a --host-discovery-script prints; -H says how many slots each has, "
                "as in node1:4"
            )
        _require_slots(policy, hosts)
    chaos = _chaos(options, policy, None if is_discovered else len(hosts))
    return ElasticSpec(policy, script_of(options) if is_discovered else None, hang_timeout_s, chaos, forks)


def _chaos(options: argparse.Namespace, policy: Policy, hosts: int | None) -> ChaosSpec | None:
    """Returns the faults that are asked for; ``hosts`` is the number of hosts, None if it is not known yet."""
    file = options.chaos_report
    if options.chaos is None:
        if file is not None:
            raise UsageError("--chaos-report: there is no --chaos to report on; add --chaos SPEC, or leave it out")
        return None
    if file is not None and (os.path.isdir(file) or not os.path.isdir(os.path.dirname(os.path.abspath(file)))):
        raise UsageError(f"--chaos-report {file}: no file can be written there: name one in a directory that exists")
    spec = parse_chaos(options.chaos, None if file is None else os.path.abspath(file))
    if not policy.on_failure.goes_on:
        name = policy.on_failure.name
        raise UsageError(f"--chaos: with --on-failure {name} the first fault ends the job: say replace, or shrink")
    shrinks = not policy.on_failure.replaces
    require_goes_on(spec, start=policy.first_np, least=policy.min_np, shrinks=shrinks, hosts=hosts)
    return spec


def script_of(options: argparse.Namespace) -> DiscoveryScript:
    """Returns the script that finds the hosts; --host-discovery-script must be given."""
    return DiscoveryScript(options.host_discovery_script, os.getcwd(), options.slots_per_host or 1)


def slots_here(options: argparse.Namespace) -> int:
    """Returns how many slots an elastic job has on this machine if the user names no hosts."""
    most = options.max_np or options.num_proc or options.min_np or 1
    return int(most + (options.spares or 0))


def _policy(options: argparse.Namespace, timeout_s: float | None) -> Policy:
    start, least, most = options.num_proc, options.min_np, options.max_np
    on_failure = ON_FAILURE[options.on_failure or ("blacklist" if options.horovod else "replace")]
    if least is None and not on_failure.refills:
        raise UsageError(f"--on-failure {on_failure.name}: with how few workers may the job go on? Say --min-np N")
    if least is None and start is None:
        raise UsageError("how many workers? An elastic job needs --min-np N, with how few it goes on, or -np N")
    if least is None and options.host_discovery_script is None and most is None:
        most = start  # elastic only in that a worker may be replaced
    least = start if least is None else least
    if most is not None and least > most:
        raise UsageError(f"--min-np {least} is more than --max-np {most}")
    if start is not None and start < least:
        raise UsageError(f"-np {start} is less than --min-np {least}")
    if start is not None and most is not None and start > most:
        raise UsageError(f"-np {start} is more than --max-np {most}")
    if options.spares and most is None:
        raise UsageError("--spares are workers beyond --max-np: say --max-np N, or each slot gets a rank")
    if options.spares and not on_failure.refills:
        name = on_failure.name
        raise UsageError(f"--spares take the places of others, which --on-failure {name} leaves empty: leave one out")
    return Policy(
        min_np=least,
        max_np=most,
        start_np=start,
        spares=options.spares or 0,
        on_failure=on_failure,
        elastic_timeout_s=options.elastic_timeout or timeout_s or Policy.elastic_timeout_s,
        cooldown_s=_cooldown_s(options),
        reset_limit=options.reset_limit,
        max_restarts=_max_restarts(options),
    )


def _require_slots(policy: Policy, hosts: Collection[Host]) -> None:
    """Raises `UsageError` if hosts that stay the same will never have enough slots."""
    if any(host.slots == AUTO for host in hosts):
        return
    slots = sum(host.slots for host in hosts)
    for flag, number in (("--min-np", policy.min_np), ("-np", policy.start_np or 0)):
        if number > slots:
            raise UsageError(
                f"{flag} {number} is more than the {slots} slots of the hosts; say how many they have, as in "
                f"host:{number}"
            )
    if policy.max_np is not None and policy.spares and policy.max_np + policy.spares > slots:
        raise UsageError(
            f"--spares {policy.spares}: the hosts have {slots} slots, and --max-np {policy.max_np} leaves too few"
        )


def _cooldown_s(options: argparse.Namespace) -> tuple[float, float] | None:
    if options.blacklist_cooldown_range is None:
        return None
    low, high = options.blacklist_cooldown_range
    if not 0 < low <= high:
        raise UsageError(
            f"--blacklist-cooldown-range {low:g} {high:g}: the first is the shortest time, more than 0, and the second "
            "the longest, such as 10 600"
        )
    return low, high


def _max_restarts(options: argparse.Namespace) -> int:
    return Policy.max_restarts if options.max_restarts is None else int(options.max_restarts)


def _refuse_those_of_elastic(options: argparse.Namespace, why: str) -> None:
    for dest in _OF_ELASTIC:
        if getattr(options, dest) is not None:
            raise UsageError(f"--{dest.replace('_', '-')} has no meaning here: {why}")


def _answer(text: str) -> str:
    if text not in _ANSWERS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_ANSWERS)}")
    return text


def _command(text: str) -> str:
    """Returns a command for a shell; it may be a file's path alone, which need not be quoted."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no command")
    path = os.path.abspath(text)
    if not os.path.isfile(path):
        return text
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} is not executable: chmod +x {shlex.quote(text)}")
    return shlex.quote(path)
