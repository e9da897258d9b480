"""The file for Prometheus: its format, its escapes, and what happens where it cannot be written."""

import os
import re

import pytest
from endings import ending_of
from hvdlite_launcher.protocol.messages import Exited, Lost, Started
from hvdlite_launcher.status.job_facts import GenerationRow, GenerationTable, JobFacts
from hvdlite_launcher.status.metrics import METRICS_EACH_S, Metrics, metrics_text
from hvdlite_launcher.status.progress import JobProgress
from hvdlite_launcher.workers.failure_message import JobOutcome
from hvdlite_wire.worker_status import HostUsage
from statuses import told


class Job:
    """A job whose events are scripted, with the facts that are kept of it."""

    def __init__(self, hosts=("node1", "node2"), table=None):
        self.now = 0.0
        self.ending = ending_of(lambda: self.now, hosts=hosts)
        self.running = self.ending.running
        self.progress = JobProgress(self.ending, lambda _: None, each_s=10.0)
        self.facts = JobFacts(self.ending, self.progress, table)
        self.happens(*(Started(rank, 100 + rank) for rank in self.running))

    def happens(self, *events):
        for event in events:
            self.progress.on_event(event)
            self.facts.on_event(event)
            if isinstance(event, Exited):
                self.running.discard(event.worker)

    def answers(self, worker, steps, number=0, **facts):
        self.happens(told(worker, number, steps=steps, **facts))


LINE = re.compile(r'[a-z_]+(\{[a-z]+="(\\.|[^"\\])*"(,[a-z]+="(\\.|[^"\\])*")*\})? [-+0-9.e]+\n')


def _samples(text):
    """Returns the samples by name and labels; asserts that each line has the form that Prometheus asks for."""
    samples, typed = {}, set()
    for line in text.splitlines(keepends=True):
        if line.startswith("# TYPE "):
            name = line.split()[2]
            assert name not in typed, "a metric's samples are one group"
            typed.add(name)
        elif not line.startswith("# HELP "):
            assert LINE.fullmatch(line), line
            series, _, value = line.rpartition(" ")
            assert series.partition("{")[0] in typed
            assert series not in samples
            samples[series] = float(value)
    return samples


def test_each_rank_has_its_steps_memory_time_and_waits():
    job = Job()
    job.answers(0, {"optimizer 1": 12, "optimizer 2": 3}, number=1, memory=1 << 30, cpu_s=1.25)
    job.answers(1, {"optimizer 1": 11}, number=1, memory=5, cpu_s=2, waits=[("an all-reduce", 3.5)])
    samples = _samples(metrics_text(job.facts, is_up=True))
    one, two = 'rank="0",worker="0",host="node1"', 'rank="1",worker="1",host="node2"'
    assert samples[f'hvdlite_steps_total{{{one},optimizer="1"}}'] == 12
    assert samples[f'hvdlite_steps_total{{{one},optimizer="2"}}'] == 3
    assert samples[f"hvdlite_resident_bytes{{{one}}}"] == 1 << 30
    assert samples[f"hvdlite_cpu_seconds_total{{{one}}}"] == 1.25
    assert samples[f"hvdlite_waiting_seconds{{{one}}}"] == 0
    assert samples[f"hvdlite_waiting_seconds{{{two}}}"] == 3.5
    assert (samples["hvdlite_up"], samples["hvdlite_workers"], samples["hvdlite_generation"]) == (1, 2, 1)


def test_each_host_has_the_bytes_over_its_network():
    job = Job()
    job.answers(1, {}, number=1, usage=HostUsage(3_000_000_000, 5))
    samples = _samples(metrics_text(job.facts, is_up=True))
    assert samples['hvdlite_network_sent_bytes_total{host="node2"}'] == 3_000_000_000
    assert samples['hvdlite_network_received_bytes_total{host="node2"}'] == 5
    assert not any("bytes_total" in series and "node1" in series for series in samples)


def test_names_are_escaped():
    job = Job(hosts=['a"b\\c\nd'])
    job.answers(0, {'o"\\': 1}, number=1, memory=1)
    assert any(r'host="a\"b\\c\nd"' in series for series in _samples(metrics_text(job.facts, is_up=True)))


def test_at_the_end_it_has_the_exit_code_and_the_last_steps():
    job = Job()
    job.answers(0, {"optimizer 1": 12}, number=1, memory=7)
    job.answers(0, {"optimizer 1": 14})
    job.happens(Exited(0, 3), Exited(1, 1, peer_lost=True))
    samples = _samples(metrics_text(job.facts, is_up=False, exit_code=3))
    assert samples['hvdlite_steps_total{rank="0",worker="0",host="node1",optimizer="1"}'] == 14
    assert (samples["hvdlite_up"], samples["hvdlite_workers"], samples["hvdlite_exit_code"]) == (0, 0, 3)
    assert not any(series.startswith("hvdlite_resident_bytes") for series in samples)


@pytest.mark.parametrize(
    ("event", "faults"),
    [
        (Exited(0, 0), 0),
        (Exited(0, 1), 1),
        (Exited(0, -9), 1),
        (Exited(0, 1, peer_lost=True), 0),
        (Lost("node1", "gone"), 1),
        (Lost("node7", "never there"), 0),
    ],
)
def test_a_fault_is_what_fails_by_itself_while_the_job_is_not_ending(event, faults):
    job = Job()
    job.happens(event)
    assert _samples(metrics_text(job.facts, is_up=True))["hvdlite_faults_total"] == faults
    job = Job()
    job.ending.decide(JobOutcome(1))
    job.happens(event)
    assert _samples(metrics_text(job.facts, is_up=True))["hvdlite_faults_total"] == 0


def test_the_generation_of_an_elastic_job_is_the_newest():
    table = GenerationTable()
    job = Job(table=table)
    assert _samples(metrics_text(job.facts, is_up=True))["hvdlite_generation"] == 0
    for number in (1, 2, 3):
        table.add(GenerationRow(number, 0.0, 2, [], []))
        assert _samples(metrics_text(job.facts, is_up=True))["hvdlite_generation"] == number


def test_the_file_is_replaced_as_a_whole_at_its_interval_and_others_may_read_it(tmp_path):
    job, path, said = Job(), tmp_path / "job.prom", []
    metrics = Metrics(str(path), job.facts, said.append)
    path.write_text("old")
    os.link(path, tmp_path / "old")
    metrics.show()
    assert path.read_text() == metrics_text(job.facts, is_up=True)
    assert (tmp_path / "old").read_text() == "old"
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_text("kept")
    metrics.show()
    assert path.read_text() == "kept"
    job.now = METRICS_EACH_S
    metrics.show()
    assert path.read_text() != "kept"
    assert sorted(os.listdir(tmp_path)) == ["job.prom", "old"]
    assert said == []


def test_what_cannot_be_written_later_is_told_once_and_the_job_goes_on(tmp_path):
    said = []
    metrics = Metrics(str(tmp_path / "gone" / "job.prom"), Job().facts, said.append)
    metrics.write(is_up=True)
    metrics.write(is_up=True)
    (line,) = said
    assert line.startswith(f"--metrics-textfile {tmp_path}/gone/job.prom: cannot be written: ")
    (tmp_path / "gone").mkdir()
    metrics.write(is_up=True)
    assert (tmp_path / "gone" / "job.prom").exists()
