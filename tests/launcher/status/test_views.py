"""All views of one job, to the character: what users and their programs see of statuses that went over the wire."""

from __future__ import annotations

import json
from pathlib import Path

from endings import ending_of
from hvdlite_launcher.host.collect import read_stacks
from hvdlite_launcher.protocol.messages import Exited, Lost, ReportAsked, Started
from hvdlite_launcher.status.job_facts import JobFacts
from hvdlite_launcher.status.job_view import JobView
from hvdlite_launcher.status.live_view import LiveView
from hvdlite_launcher.status.metrics import metrics_text
from hvdlite_launcher.status.progress import JobProgress
from hvdlite_launcher.status.reports import Reports
from hvdlite_launcher.status.summary import summary_data
from hvdlite_launcher.workers.failure_message import JobOutcome
from hvdlite_wire.worker_status import Frame, HostUsage, Pace, Process, Source, StepStatus, Thread
from statuses import told

GOLDEN = Path(__file__).with_name("views.txt")
NONE = {"source": Source.NONE, "can_answer": True}
STACKS = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 10 in wait

Current thread 0x00007f02 (most recent call first):
  File "/lib/re.py", line 166 in match
  File "t.py", line 10 in load
  File "t.py", line 13 in <module>
"""


class Job:
    """Three ranks on two hosts. Its ``views`` are texts by name."""

    def __init__(self) -> None:
        self.now_s, self.views = 0.0, {}
        self.ending = ending_of(lambda: self.now_s, say=self.show("report"), hosts=["node1", "node1", "node2"])
        self.reports = Reports(self.ending, lambda _: None, directory=None, ended=lambda: [7])
        self.progress = JobProgress(self.ending, lambda _: None, each_s=2.0)
        self.facts = JobFacts(self.ending, self.progress, None)
        self.facts.began_at = 1000.0

    def show(self, name: str):
        return lambda text: self.views.__setitem__(name, text)

    def happens(self, *events: object) -> None:
        for event in events:
            self.progress.on_event(event)
            self.facts.on_event(event)
            if isinstance(event, Exited):
                self.ending.running.discard(event.worker)


def take_report(job: Job) -> None:
    own = Process(201, "python", "sleeping", 1.5, 1 << 20, "python t.py")
    frames = (Frame("t.py", 9, "main"), Frame("t.py", 50, "train"), Frame("/lib/x.py", 1, "f"))
    job.reports.on_asked(ReportAsked())
    job.reports.on_asked(ReportAsked(lambda _, data: job.show("report as JSON")(json.dumps(data, indent=1))))
    host = {"in_full": True, "load": 2.5, "cores": 2}
    job.reports.on_told(
        told(
            0, 1, **host, pid=201, processes=(own, Process(301, "sh", "running", 1.5, 1 << 20, "sh -c x")),
            can_answer=True, libraries=("/lib/",), threads=(Thread("MainThread", True, frames),),
            waits=[("a barrier", 61.5)], optimizers=(StepStatus("optimizer 1", 4, "gradients", 3, 1, ("w",)),),
            addresses=("10.0.0.1",), silent_s={"10.0.0.2": 3.0},
        )
    )  # fmt: skip
    process = Process(102, "python", "running", 1.5, 1 << 20, "python t.py")
    stacks = read_stacks('{"libraries": ["/lib/"]}\n', STACKS)
    job.reports.on_told(told(1, 1, **host, pid=102, processes=(process,), can_answer=True, **stacks))
    job.reports.on_told(told(2, 1, in_full=True, pid=103, source=Source.NONE, load=0.25, cores=2))


def train(job: Job) -> None:
    job.happens(*(Started(number, 101 + number) for number in range(3)))
    for number, second in enumerate((0, 2, 4), 1):
        job.now_s = float(second)
        while job.progress.time_left_s() <= 0:
            job.progress.time_passes()
        steps = {"optimizer 1": 10 * second}
        job.happens(
            told(
                0, number, pid=201, cpu_s=1.0 * second, memory=10**9, gpu_use=0.5, waits=[("a barrier", 3.25)],
                steps={**steps, "optimizer 2": second}, samples=64 * second,
                paces=(Pace(0, 0.0, None), Pace(1, 0.25, "data")), usage=HostUsage(1000 * second, 5 * second, (0.5, 1)),
            ),
            told(1, number, pid=202, cpu_s=0.5 * second, memory=10**8, can_answer=True, steps=steps),
            told(2, number, pid=103, cpu_s=0.5, memory=10**7, **NONE, usage=HostUsage(7, 9)),
        )  # fmt: skip


def look(job: Job) -> None:
    view = JobView.of(job.facts, ["python", "train.py"])
    drawn = LiveView(environ={}).lines(view, 110, 20)
    job.show("live view")("\n".join([*drawn, view.plain_line()]).replace("\x1b", "ESC"))
    job.show("metrics")(metrics_text(job.facts, is_up=True))
    of_another_process = JobView.from_data(json.loads(json.dumps(view.data())))
    assert LiveView(environ={}).lines(of_another_process, 110, 20) == drawn
    assert of_another_process.plain_line() == view.plain_line()


def end(job: Job) -> None:
    last = told(1, pid=202, can_answer=True, steps={"optimizer 1": 44})
    job.happens(last, Exited(1, 3, peak_memory=700), Exited(0, 1, peer_lost=True), Lost("node2", "gone"))
    job.show("metrics at the end")(metrics_text(job.facts, is_up=False, exit_code=3))
    summary = summary_data(job.facts, JobOutcome(3, "why", rank=1), ["python"], 0)
    job.show("summary")(json.dumps(summary, indent=1))


def test_all_views_of_a_job_are_as_they_were():
    job = Job()
    for act in (take_report, train, look, end):
        act(job)
    shown = "".join(f"==== {name}\n{text}\n" for name, text in job.views.items())
    assert shown == GOLDEN.read_text(encoding="utf-8")
