"""
hvdlite's log: the logger, and where its lines go.

A program that sets up `logging` itself has hvdlite's lines among its own. Where ``HVDLITE_LOG_LEVEL`` is set (see
`environment`), and only there, they go to stderr, with their rank, from this level on.
"""

from __future__ import annotations

import logging

from .environment import TRACE, Environment

log = logging.getLogger("hvdlite")


class _OfOneRank(logging.StreamHandler):  # type: ignore[type-arg]  # the stream is sys.stderr
    """hvdlite's one handler."""

    def __init__(self, rank: int, *, hide_time: bool) -> None:
        super().__init__()
        time = "" if hide_time else "%(asctime)s "
        self.setFormatter(logging.Formatter(f"{time}hvdlite[{rank}] %(levelname)s: %(message)s"))


def open_log(environment: Environment, rank: int) -> None:
    """Let the log go where the environment says, and no more where an earlier one said."""
    for handler in [each for each in log.handlers if isinstance(each, _OfOneRank)]:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
        log.propagate = True
    if environment.log_level is not None:
        logging.addLevelName(TRACE, "TRACE")
        log.addHandler(_OfOneRank(rank, hide_time=environment.log_hide_time))
        log.setLevel(environment.log_level)
        # Or whoever has set up the root logger as well would see each line twice.
        log.propagate = False
