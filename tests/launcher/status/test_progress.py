"""How far the workers are, from scripted answers: rates are differences."""

from endings import ending_of
from hvdlite_launcher.status.progress import HostBytes, JobProgress
from hvdlite_wire.worker_status import HostUsage, Pace, Source
from statuses import told


class Job:
    """A job's progress, the questions that were asked, and when each round was shown."""

    def __init__(self, workers=2, each_s=1.0):
        self.now, self.asked, self.shown = 0.0, [], []
        ending = ending_of(lambda: self.now, hosts=[f"node{number}" for number in range(workers)])
        self.running, self.roster = ending.running, ending.roster
        self.progress = JobProgress(ending, lambda question: self.asked.append(question.number), each_s=each_s)
        self.progress.show_with(lambda: self.shown.append(self.now))

    def go_on(self):
        self.now += max(0.0, self.progress.time_left_s())
        self.progress.time_passes()

    def answer(self, worker, steps=None, number=None, **facts):
        number = self.asked[-1] if number is None else number
        source = Source.NONE if steps is None else Source.ANSWER
        given = {"pid": 100 + worker, "can_answer": True, "source": source, "steps": steps or {}, **facts}
        self.progress.on_event(told(worker, number, **given))


def test_each_question_is_shown_once_all_have_answered_or_soon_after():
    job = Job()
    job.go_on()
    assert job.asked == [1]
    job.answer(0, {})
    job.answer(1, {})
    job.go_on()
    assert job.shown == [0.0]
    job.go_on()
    job.answer(0, {})
    job.go_on()
    assert (job.asked, job.shown) == ([1, 2], [0.0, 1.5])


def test_rates_and_processor_use_are_differences_over_time():
    job = Job()
    for second in range(30):
        job.now = float(second)
        job.progress.time_passes()
        job.answer(0, {"optimizer 1": 4 * second, "optimizer 2": second}, cpu_s=0.5 * second, memory=second)
    rank = job.progress.of(0)
    assert (rank.step, rank.rate, rank.cpu_use, rank.memory) == (116, 4.0, 0.5, 29)


def test_a_process_that_begins_anew_has_no_rate_yet():
    job = Job()
    job.go_on()
    job.answer(0, {"optimizer 1": 100})
    job.go_on()
    job.go_on()
    job.answer(0, {"optimizer 1": 3})
    assert (job.progress.of(0).step, job.progress.of(0).rate) == (3, None)


def test_a_rank_that_does_not_answer_keeps_its_steps_and_is_silent():
    job = Job()
    job.go_on()
    job.answer(0, {"optimizer 1": 7}, waits=[("an all-reduce", 3.5)])
    assert (job.progress.of(0).waits_for, job.progress.of(0).waited_s) == ("an all-reduce", 3.5)
    job.answer(0, memory=5)
    rank = job.progress.of(0)
    assert (rank.step, rank.is_silent, rank.memory, rank.waits_for) == (7, True, 5, "")
    job.answer(1, can_answer=False)
    assert not job.progress.of(1).is_silent


def test_a_rank_that_does_not_answer_since_it_is_ending_is_not_silent():
    job = Job(2)
    job.go_on()
    job.answer(0, can_answer=True, is_ending=True)
    rank = job.progress.of(0)
    assert (rank.is_ending, rank.is_silent) == (True, False)


def test_the_last_word_of_a_worker_counts_and_leaves_its_memory():
    job = Job()
    job.go_on()
    job.answer(0, {"optimizer 1": 7}, memory=5, cpu_s=1.0)
    job.answer(0, {"optimizer 1": 9}, number=0)
    rank = job.progress.of(0)
    assert (rank.step, rank.memory, rank.cpu_s) == (9, 5, 1.0)


def test_what_is_told_of_others_is_left_out():
    job = Job()
    job.go_on()
    before = job.progress.of(0)
    job.progress.on_event(told(99, 1, steps={"optimizer 1": 7}))
    job.progress.on_event(told(0, 1, in_full=True, steps={"optimizer 1": 7}))
    assert job.progress.of(0) == before


def test_nobody_is_asked_until_somebody_looks_and_no_longer_than_that():
    job = Job(each_s=None)
    assert job.progress.time_left_s() is None
    job.progress.hurry(2.0, for_s=6.0)
    while job.progress.time_left_s() is not None:
        job.go_on()
    assert (job.asked, job.now) == ([1, 2, 3], 6.0)
    job.progress.hurry(2.0, for_s=6.0)
    job.go_on()
    assert job.asked == [1, 2, 3, 4]


def test_who_looks_has_those_asked_sooner_that_are_asked_anyway():
    job = Job(each_s=10.0)
    job.go_on()
    job.go_on()
    job.progress.hurry(2.0, for_s=3.0)
    asked_at = []
    while job.now < 30.0:
        count = len(job.asked)
        job.go_on()
        asked_at += [job.now] * (len(job.asked) - count)
    assert asked_at == [0.5, 2.5, 4.5, 14.5, 24.5, 34.5]


def test_the_rate_begins_with_the_first_step_and_not_with_the_imports_before():
    job = Job()
    for second in range(5):
        job.now = float(second)
        job.progress.time_passes()
        job.answer(0, {"optimizer 1": 10 * second} if second >= 3 else {})
    assert job.progress.of(0).rate == 10.0


def test_samples_and_what_a_rank_costs_the_others_are_told_by_the_program():
    job = Job()
    for second in range(3):
        job.now = float(second)
        job.progress.time_passes()
        job.answer(0, {}, samples=64 * second, paces=(Pace(0, 0.0, None), Pace(1, 0.25, "data")))
        job.answer(1, {})
    assert (job.progress.of(0).sample_rate, job.progress.of(1).sample_rate) == (64.0, None)
    assert (job.progress.of(0).cost, job.progress.of(0).slow_phase) == (0.0, "")
    assert (job.progress.of(1).cost, job.progress.of(1).slow_phase) == (0.25, "data")


def test_the_load_of_a_host_comes_with_one_of_its_workers():
    job = Job()
    for second in range(3):
        job.now = float(second)
        job.progress.time_passes()
        job.answer(1, usage=HostUsage(1000 * second, 10 * second, (0.5, 1.0)), gpu_use=0.5)
    host = job.progress.of_host("node1")
    assert (host.sent, host.received, list(host.gpus)) == (1000.0, 10.0, [0.5, 1.0])
    assert job.progress.of(1).gpu_use == 0.5
    assert job.progress.of_host("node0").sent is None
    job.now += 1.0
    job.answer(1, usage=HostUsage(0, 0))  # counters that began anew
    assert job.progress.of_host("node1").sent is None


def test_the_bytes_of_a_host_add_up_over_agents_and_until_its_workers_end():
    job = Job()
    for sent in (1000, 2500, 300):  # the last is a new agent's
        job.answer(1, number=1, usage=HostUsage(sent, 2 * sent))
    assert job.progress.total_bytes == {"node1": HostBytes(2800, 5600)}
    job.answer(1, {}, number=0, usage=HostUsage(400, 900))
    assert job.progress.total_bytes == {"node1": HostBytes(2900, 5900)}


def test_only_those_that_run_are_told_of_by_rank():
    job = Job(workers=3)
    job.roster[0].rank = 9
    job.running.discard(1)
    assert [each.worker for each in job.progress.of_running()] == [2, 0]
