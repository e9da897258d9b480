"""
hvdlite's logger, and the handler that prints its lines.

By default, hvdlite's lines appear in whatever the program has set up with `logging`. If ``HVDLITE_LOG_LEVEL`` is set
(see `environment`), lines of this level and above go to stderr instead, each with its rank. All packages log through
`log`; `hvd.init` calls `open_log`.
"""

from __future__ import annotations

import logging

from .environment import TRACE, Environment

log = logging.getLogger("hvdlite")


class _OfOneRank(logging.StreamHandler):  # type: ignore[type-arg]  # the stream is sys.stderr
    """Prints the log to stderr, each line with its rank; the only handler that hvdlite installs."""

    def __init__(self, rank: int | str, *, hide_time: bool) -> None:
        super().__init__()
        time = "" if hide_time else "%(asctime)s "
        self.setFormatter(logging.Formatter(f"{time}hvdlite[{rank}] %(levelname)s: %(message)s"))


def open_log(environment: Environment, rank: int | str) -> None:
    """Sets up the log as the environment says, and undoes what an earlier call has set up.

    ``rank`` is a text where the rank is not known yet.
    """
    for handler in [each for each in log.handlers if isinstance(each, _OfOneRank)]:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
        log.propagate = True
    if environment.log_level is not None:
        logging.addLevelName(TRACE, "TRACE")
        log.addHandler(_OfOneRank(rank, hide_time=environment.log_hide_time))
        log.setLevel(environment.log_level)
        # Otherwise each line would appear twice where the program has set up the root logger too.
        log.propagate = False
