"""An `Ending` of a job that nothing ends, for what is told of a job's events."""

from hvdlite_launcher.workers.ending import Ending, Roster


def ending_of(clock=lambda: 0.0, *, say=lambda text: None, hosts=()):
    """Returns one whose workers run, one on each of these hosts, with the ranks from 0."""
    ending = Ending(
        Roster(), signal_workers=lambda numbers, signum: None, say=say, log=lambda text: None, grace=0, clock=clock
    )
    for number, host in enumerate(hosts):
        ending.roster.add(number, host, number)
        ending.roster[number].pid = 100 + number
        ending.running.add(number)
    return ending
