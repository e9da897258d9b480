"""When reports are taken, and who gets them: scripts of events, on a clock of the test's."""

from __future__ import annotations

import json

from endings import ending_of
from hvdlite_launcher.protocol.messages import ReportAsked, Stalled, Unresponsive
from hvdlite_launcher.status.reports import Reports
from statuses import told


class Job:
    """The reports of a job of some workers, and what they have asked for and said."""

    def __init__(self, workers: int = 2, directory: str | None = None) -> None:
        self.now_s = 0.0
        self.ended: list[int] = []
        self.asked: list[int] = []
        self.said: list[str] = []
        self.answers: list[tuple[str, object]] = []
        self.reports = Reports(
            ending_of(lambda: self.now_s, say=self.said.append, hosts="a" * workers),
            lambda question: self.asked.append(question.number),
            directory=directory,
            ended=lambda: self.ended,
        )

    def come(self, *workers: int, number: int = 1) -> Job:
        for worker in workers:
            self.reports.on_told(told(worker, number, in_full=True, pid=100 + worker))
        return self

    def quit(self) -> Job:
        self.reports.on_asked(ReportAsked())
        return self

    def ask(self) -> Job:
        self.reports.on_asked(ReportAsked(lambda text, data: self.answers.append((text, data))))
        return self


def test_a_report_is_shown_once_all_workers_have_come():
    job = Job().quit().come(0)
    assert (job.asked, job.said) == ([1], [])
    job.come(1)
    assert job.said[0].startswith("report 1 on 2 ranks, asked for by SIGQUIT\n")
    assert job.reports.time_left_s() is None


def test_a_worker_that_does_not_come_in_time_is_named_as_the_cause():
    job = Job().quit().come(0)
    job.now_s = job.reports.time_left_s()
    job.reports.time_passes()
    assert "cause: rank 1 (worker 1 on a, pid 101) has no report: its host did not answer in time" in job.said[0]
    assert not job.come(1).said[1:]


def test_a_worker_that_ends_meanwhile_is_not_waited_for():
    job = Job().quit().come(0)
    job.reports.on_exit(1)
    assert job.said[0].startswith("report 1 on 1 rank,")


def test_ranks_that_have_ended_are_named():
    job = Job(workers=1).ask()
    job.ended = [2]
    text, data = job.come(0).answers[0]
    assert text.splitlines()[:2] == [
        "report 1 on 1 rank, asked for by hvdlite-run --report or --diagnose",
        "  rank 2 has ended",
    ]
    assert data["ended"] == [2]
    job.ended = [3, 1, 2]
    assert job.ask().come(0, number=2).answers[1][0].splitlines()[1] == "  ranks 1-3 have ended"


def test_who_asks_gets_the_report_and_the_screen_does_not():
    job = Job().ask().ask().come(0, 1)
    assert job.asked == [1]
    assert job.said == []
    assert len(job.answers) == 2
    text, data = job.answers[0]
    assert text.startswith("report 1 on 2 ranks, asked for by hvdlite-run --report or --diagnose\n")
    assert [each["worker"] for each in data["ranks"]] == [0, 1]


def test_who_asks_while_a_report_is_taken_gets_that_one_and_sigquit_shows_it():
    job = Job().ask().quit().come(0, 1)
    assert job.asked == [1]
    assert len(job.said) == len(job.answers) == 1


def test_a_late_answer_to_an_earlier_report_is_ignored():
    job = Job().quit().come(0, 1).quit().come(0, number=2).come(1, number=1)
    assert len(job.said) == 1
    assert job.come(1, number=2).said[1].startswith("report 2")


def test_a_stalled_job_is_reported_once_in_ten_minutes():
    job = Job()
    job.reports.on_stalled(Stalled(1, 60.4))
    job.come(0, 1)
    assert job.said[0].startswith("report 1 on 2 ranks, since rank 1 has waited 60 s for others\n")
    job.now_s = 599.0
    job.reports.on_stalled(Stalled(0, 60.0))
    assert job.asked == [1]
    job.now_s = 600.0
    job.reports.on_stalled(Stalled(0, 60.0))
    assert job.asked == [1, 2]


def test_a_worker_that_does_not_respond_is_reported_by_its_rank():
    job = Job()
    job.reports.on_unresponsive(Unresponsive(1, 23.4))
    job.come(0, 1)
    assert job.said[0].startswith("report 1 on 2 ranks, since rank 1 has not responded for 23 s\n")


def test_a_start_that_is_late_is_reported_on_the_screen():
    job = Job()
    job.reports.on_late_start(55.0)
    job.come(0, 1)
    assert job.said[0].startswith("report 1 on 2 ranks, since ranks have waited 55 s in hvd.init() for others\n")


def test_before_any_worker_runs_a_report_is_empty_and_comes_at_once():
    job = Job(0).quit()
    assert job.asked == []
    assert job.said[0].startswith("report 1 on 0 ranks, asked for by SIGQUIT")


def test_reports_are_written_as_text_and_json(tmp_path):
    Job(directory=f"{tmp_path}/r").quit().come(0, 1)
    assert (tmp_path / "r/report-1.txt").read_text().startswith("report 1 on 2 ranks")
    data = json.loads((tmp_path / "r/report-1.json").read_text())
    assert (data["report"], len(data["ranks"])) == (1, 2)


def test_a_directory_that_cannot_be_written_is_told_once_and_reports_go_on(tmp_path):
    (tmp_path / "file").touch()
    job = Job(directory=f"{tmp_path}/file").quit().come(0, 1)
    assert job.said[1] == f"--report-dir {tmp_path}/file: reports are not written: Not a directory. The job goes on"
    assert len(job.quit().come(0, 1, number=2).said) == 3
    (tmp_path / "file").unlink()
    job.quit().come(0, 1, number=3)
    assert (tmp_path / "file" / "report-3.txt").exists()
