"""The page of ``--summary job.html``: charts of what was asked for, in HTML that needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from endings import ending_of
from hvdlite_launcher.protocol.messages import Exited, Started
from hvdlite_launcher.status import summary
from hvdlite_launcher.status.job_facts import GenerationRow, GenerationTable, JobFacts
from hvdlite_launcher.status.progress import JobProgress
from hvdlite_launcher.status.summary import History, Moment, summary_data, summary_page
from hvdlite_launcher.workers.failure_message import JobOutcome
from hvdlite_wire.worker_status import HostUsage, Pace
from statuses import told


class Job:
    """A job of two ranks that is asked each two seconds."""

    def __init__(self, table: GenerationTable | None = None) -> None:
        self.now = [0.0]
        ending = ending_of(lambda: self.now[0], hosts=("node1", "node<2>"))
        self.progress = JobProgress(ending, lambda _: None, each_s=2.0)
        self.facts = JobFacts(ending, self.progress, table)
        self.history = History(self.facts)
        for number in ending.running:
            self.facts.on_event(Started(number, 100 + number))

    def tell(self, at_s: float, *events) -> None:
        self.now[0] = at_s
        for event in events:
            self.progress.on_event(event)
            self.facts.on_event(event)
        self.history.note()

    def page(self, outcome: JobOutcome, *command: str) -> str:
        return summary_page(summary_data(self.facts, outcome, command, 1), self.history.moments)


class Checked(HTMLParser):
    """Collects what the page has; fails where an element is not closed, or names something outside of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.points: list[list[tuple[float, float]]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            assert name not in ("src", "href", "onload", "onclick")
            assert "url(" not in (value or "")
            if name == "points":
                self.points.append([tuple(map(float, place.split(","))) for place in value.split()])
        assert tag not in ("script", "link", "iframe", "img")
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_it_has_the_end_charts_of_what_is_known_and_all_ranks():
    table = GenerationTable()
    table.add(GenerationRow(1, 0.5, 2, ["workers 0, 1 on node1"], []))
    job = Job(table)
    for second in range(2, 40, 2):
        job.tell(
            second,
            told(
                0,
                second,
                steps={"optimizer": 10 * second},
                memory=10**9,
                paces=(Pace(0, 0.0, None), Pace(1, 0.25, "data")),
            ),
            told(1, second, steps={"optimizer": 10 * second}, memory=2 * 10**9, usage=HostUsage(10**8 * second, 0)),
        )
    job.tell(40, Exited(1, 3, peak_memory=3 * 10**9))
    page = job.page(JobOutcome(3, "rank 1 failed:\n    ValueError: <b>bad</b> & worse", rank=1), "python", "<train>.py")
    found = Checked(page)
    text = "\n".join(found.texts)
    for words in (
        "failed",
        "python <train>.py",
        "ValueError: <b>bad</b> & worse",
        "rank 1 failed first",
        "exit code 3",
    ):
        assert words in text
    for title in (
        "Steps per second",
        "Memory",
        "Sent over the network",
        "Part of each step that a rank costs the others",
    ):
        assert title in text
    assert "Samples per second" not in text, "nothing is known of them"
    assert "node<2>" in text
    assert "3.0 GB" in text
    assert "workers 0, 1 on node1" in text
    rates = found.points[0]
    assert len(rates) >= 18
    assert rates[-1][0] <= 640
    assert all(0 <= y <= 150 for line in found.points for _, y in line)


def test_a_job_that_ended_before_it_was_asked_has_a_page_without_charts():
    found = Checked(Job().page(JobOutcome(), "true"))
    assert "done" in found.texts
    assert found.points == []


def test_of_many_ranks_those_are_drawn_that_come_highest():
    job = Job()
    memory = {f"rank {number}": 100.0 + number for number in range(20)}
    job.history.moments = [Moment(at, 20, None, None, memory, {}, {}, {}) for at in (1.0, 2.0)]
    found = Checked(job.page(JobOutcome(), "true"))
    assert len(found.points) == 8
    assert "and 12 more" in "".join(found.texts)
    assert " rank 19" in found.texts


def test_a_long_job_keeps_a_bounded_number_of_moments_over_all_of_its_time(monkeypatch):
    monkeypatch.setattr(summary, "_MOST_MOMENTS", 10)
    job = Job()
    for second in range(200):
        job.tell(second)
    times = [each.at_s for each in job.history.moments]
    assert 5 <= len(times) < 10
    assert times == sorted(times)
    assert times[0] < 40
    assert times[-1] > 160
    steps = {round(later - earlier) for earlier, later in pairwise(times)}
    assert len(steps) == 1, "evenly spread"


@pytest.mark.parametrize("name", ["rank 3", "<script>alert(1)</script>"])
def test_names_are_escaped(name):
    job = Job()
    job.history.moments = [Moment(1.0, 1, 2.0, None, {name: 5.0}, {}, {}, {})]
    page = job.page(JobOutcome(), name)
    assert not re.search("<script", page)
    assert name in "".join(Checked(page).texts)
