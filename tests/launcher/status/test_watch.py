"""Who looks at a job has its workers asked, and gets what there is to see."""

from endings import ending_of
from hvdlite_launcher.protocol.messages import WatchAsked
from hvdlite_launcher.status.job_facts import JobFacts
from hvdlite_launcher.status.job_view import JobView
from hvdlite_launcher.status.live_view import EACH_S, LiveView, Watch
from hvdlite_launcher.status.progress import JobProgress


class Job:
    """A job of two workers that runs, and its watch."""

    def __init__(self, each_s):
        self.now, self.asked = 0.0, []
        ending = ending_of(lambda: self.now, hosts=("node", "node"))
        self.progress = JobProgress(ending, self.asked.append, each_s=each_s)
        self.watch = Watch(JobFacts(ending, self.progress, None), ["python", "train.py"])

    def run(self, until_s):
        while (left_s := self.progress.time_left_s()) is not None and self.now + left_s <= until_s:
            self.now += max(0.0, left_s)
            self.progress.time_passes()
        self.now = until_s


def test_another_process_gets_the_view_and_has_the_workers_asked_as_long_as_it_asks():
    job, answers = Job(each_s=None), []
    for _ in range(5):
        job.watch.on_event(WatchAsked(answers.append))
        job.run(job.now + EACH_S)
    assert len(job.asked) == 6
    job.run(1000.0)
    assert len(job.asked) < 10
    views = [JobView.from_data(each) for each in answers]
    assert [view.age_s for view in views] == [each * EACH_S for each in range(5)]
    assert [rank.worker for rank in views[0].ranks] == [0, 1]


def test_the_live_view_is_drawn_after_each_question():
    job, views = Job(each_s=EACH_S), []
    job.watch.draw_with(LiveView(environ={"NO_COLOR": "1"}), views.append)
    job.run(10 * EACH_S)
    assert len(views) == 10
    assert views[-1](40, 1) == ["── 0:00:18  2 ranks on 1 host"]


def test_where_nothing_can_be_drawn_there_is_a_line_each_10_s():
    job, said = Job(each_s=EACH_S), []
    job.watch.tell_with(said.append)
    job.run(60.0)
    assert said[0] == "0:00:06: 2 ranks on 1 host"
    assert 5 <= len(said) <= 6
