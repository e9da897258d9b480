"""`Reports`: takes reports on a running job, one at a time, and passes each on when all hosts have answered.

AskStatus to the agents ──► on_told, until all have come, or the time is over ──► screen, files, who has asked
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection

from hvdlite_wire.safe_paths import write_file

from ..errors import why_not_written
from ..protocol.messages import AskStatus, ReportAsked, Stalled, StatusTold, Unresponsive
from ..workers.ending import Ending
from .job_report import JobReport
from .rank_status import RankStatus

# Agents stop to collect after 4 s.
_COMPLETE_WITHIN_S = 4.5
# At least so long after a report that nobody has asked for comes the next such one.
_PAUSE_S = 600.0

Answer = Callable[[str, object], None]


class Reports:
    def __init__(
        self,
        ending: Ending,
        ask: Callable[[AskStatus], None],
        *,
        directory: str | None,
        ended: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """``ask`` sends a question to all agents. ``directory`` is --report-dir.

        ``ended`` returns the ranks that have ended, of which a report has only the number.
        """
        self._ask = ask
        self._ending = ending
        self._directory = directory
        self._ended = ended
        self._has_failed = False
        self._number = 0
        self._began_at: float | None = None
        self._why = ""
        self._is_shown = False
        self._askers: list[Answer] = []
        self._waiting: set[int] = set()
        self._found: dict[int, RankStatus] = {}
        self._last_at: float | None = None

    def on_asked(self, asked: ReportAsked) -> None:
        """Takes a report: for another process, which gets it, or to be shown, after SIGQUIT."""
        if asked.answer is None:
            self._begin("asked for by SIGQUIT", is_shown=True)
        else:
            self._askers.append(asked.answer)
            self._begin("asked for by hvdlite-run --report or --diagnose", is_shown=False)

    def on_stalled(self, stalled: Stalled) -> None:
        """Takes a report since a worker has waited for long, unless there was one lately."""
        now_s = self._ending.clock()
        if self._last_at is None or now_s - self._last_at >= _PAUSE_S:
            self._last_at = now_s
            name = self._ending.roster.name([stalled.worker])
            self._begin(f"since {name} has waited {stalled.waited_s:.0f} s for others", is_shown=True)

    def on_unresponsive(self, unresponsive: Unresponsive) -> None:
        name = self._ending.roster.name([unresponsive.worker])
        self._begin(f"since {name} has not responded for {unresponsive.silent_s:.0f} s", is_shown=True)

    def on_late_start(self, waited_s: float) -> None:
        """Takes a report since some ranks have waited so long in hvd.init() for others, which will end the job."""
        self._begin(f"since ranks have waited {waited_s:.0f} s in hvd.init() for others", is_shown=True)

    def on_told(self, told: StatusTold) -> None:
        if told.in_full and self._began_at is not None and told.number == self._number:
            self._found[told.worker] = RankStatus.known(told.worker, self._ending.roster, told.status)
            self._forget(told.worker)

    def on_exit(self, worker: int) -> None:
        if self._began_at is not None:
            self._forget(worker)

    def time_left_s(self) -> float | None:
        return None if self._began_at is None else self._began_at + _COMPLETE_WITHIN_S - self._ending.clock()

    def time_passes(self) -> None:
        """Ends a report whose time is over, without the workers that have not come."""
        if (left_s := self.time_left_s()) is not None and left_s <= 0:
            for worker in self._waiting:
                self._found[worker] = RankStatus.known(worker, self._ending.roster, has_come=False)
            self._finish()

    def _begin(self, why: str, *, is_shown: bool) -> None:
        self._is_shown = self._is_shown or is_shown
        if self._began_at is not None:  # its answer is for this one, too
            return
        self._number += 1
        self._began_at, self._why = self._ending.clock(), why
        self._found.clear()
        self._waiting = set(self._ending.running)
        if self._waiting:
            self._ask(AskStatus(self._number, in_full=True))
        else:
            self._finish()

    def _forget(self, worker: int) -> None:
        self._waiting.discard(worker)
        if not self._waiting:
            self._finish()

    def _finish(self) -> None:
        assert self._began_at is not None, "it was begun"
        took_s = self._ending.clock() - self._began_at
        report = JobReport(self._number, self._why, list(self._found.values()), took_s, sorted(self._ended()))
        self._began_at = None
        text, data = report.text(), report.data()
        if self._is_shown:
            self._ending.say(text)
        askers, self._askers, self._is_shown = self._askers, [], False
        self._write(text, data)
        for answer in askers:
            answer(text, data)

    def _write(self, text: str, data: object) -> None:
        if self._directory is None:
            return
        has_failed, self._has_failed = self._has_failed, False
        try:
            for suffix, content in (("txt", text), ("json", json.dumps(data, indent=1))):
                fd = write_file(os.path.join(self._directory, f"report-{self._number}.{suffix}"))
                # The user's locale may lack the letters of a program's names.
                with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(content + "\n")
        except OSError as error:
            self._has_failed = True
            if not has_failed:  # told once: the job goes on, and the next report is tried again
                why = why_not_written(error)
                self._ending.say(f"--report-dir {self._directory}: reports are not written: {why}. The job goes on")
