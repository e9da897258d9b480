"""Timelines: their contents, how they start and stop, and that all ranks' times are on one clock."""

from __future__ import annotations

import copy
import errno
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from timelines import assert_rows_are_tidy, is_about, read_events, read_part, spans
from torch import nn
from training import take_steps
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite import timeline
from hvdlite.calls.handle import Handle
from hvdlite.calls.operation import ALLREDUCE, Operation
from hvdlite.comm import recorder
from hvdlite.comm.group import Group
from hvdlite.comm.recorder import GpuClock, Recorder, Recording, Row
from hvdlite.runtime.world import current_world
from hvdlite.timeline import Destination, clock_ahead_ns, events_of, open_part, set_right, shown_path

STEPS, BUCKETS = 3, 2
MODEL = nn.Linear(4, 2)
NAMES = ["ready", "wire", "all-reduce"]


def train(steps: int = STEPS) -> None:
    """Trains this many steps of a model whose gradients are in two buckets."""
    model = copy.deepcopy(MODEL)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), bucket_cap_mb=1e-6,
    )  # fmt: skip
    take_steps(optimizer, lambda _: model(torch.ones(1, 4)).sum(), range(steps))
    optimizer.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_bucket_of_every_step_is_there_on_every_rank(size, tmp_path):
    path = tmp_path / "timeline.json"

    def record(rank: int) -> None:
        train()
        hvd.start_timeline(path)
        train()
        hvd.allreduce(torch.ones(1), name='a "name"')
        hvd.stop_timeline()
        train()

    run_worlds(size, record)
    events = read_events(path)
    # A single rank has no other to send them to.
    buckets = range(BUCKETS if size > 1 else 0)
    assert_rows_are_tidy(events)
    assert min(event["ts"] for event in events if "ts" in event) >= 0
    for rank in range(size):
        (process,) = [event for event in events if is_about(event, rank, "process_name")]
        assert process["args"]["name"] == f"rank {rank} (node{rank})"
        steps = [span["name"] for span in spans(events, rank, "optimizer 2") if span["name"] != "wait"]
        assert steps == [name for step in range(1, STEPS + 1) for name in (f"step {step}", "synchronize")]
        assert len(spans(events, rank, "optimizer 2", "wait")) == STEPS * len(buckets)
        for bucket in buckets:
            row = spans(events, rank, f"optimizer 2, bucket {bucket}")
            assert [span["name"] for span in row] == NAMES * STEPS
            assert row[2]["args"] == {
                "of": f"gradients of {['bias', 'weight'][bucket]}",
                "bytes": row[2]["args"]["bytes"],
            }
        assert len(spans(events, rank)) == STEPS * (2 + len(buckets) * 4) + len(spans(events, rank, "operations"))
    # All ranks are in an all-reduce at the same time, also by each other's clocks.
    for bucket in buckets:
        for step in range(STEPS):
            together = [
                spans(events, rank, f"optimizer 2, bucket {bucket}", "all-reduce")[step] for rank in range(size)
            ]
            latest_start = max(span["ts"] for span in together)
            assert latest_start <= min(span["ts"] + span["dur"] for span in together)
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_gets_a_file_for_each_rank_that_says_whose_it_is(tmp_path):
    directory = tmp_path / "traces"

    def record(rank: int) -> None:
        hvd.start_timeline(f"{directory}/")
        train()
        hvd.stop_timeline()

    def again(rank: int) -> None:
        hvd.start_timeline(directory)  # it is there
        hvd.stop_timeline()

    run_worlds(3, record)
    assert {entry.name for entry in directory.iterdir()} == {"rank0.json", "rank1.json", "rank2.json"}
    for rank in range(3):
        text = (directory / f"rank{rank}.json").read_text()
        # Readers search the first lines for the rank, with a space before the number.
        assert f'"rank": {rank},' in text.partition("\n")[0]
        trace = json.loads(text)
        assert trace["distributedInfo"] == {"backend": "hvdlite", "rank": rank, "world_size": 3}
        assert {event["pid"] for event in trace["traceEvents"]} == {rank}
        assert len(spans(trace["traceEvents"], rank, "optimizer 1", "synchronize")) == STEPS
        assert all("cat" in event for event in trace["traceEvents"] if event["ph"] == "X")
    run_worlds(2, again)
    assert {entry.name for entry in directory.iterdir()} == {"rank0.json", "rank1.json"}


def test_a_directory_is_one_if_the_path_ends_in_a_slash_or_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path("traces") == f"{tmp_path}/traces"
    assert shown_path("traces/") == f"{tmp_path}/traces/"
    (tmp_path / "traces").mkdir()
    assert shown_path(Path("traces")) == f"{tmp_path}/traces/"


def test_parts_of_ranks_in_a_directory_are_found_when_a_job_ends_early(tmp_path):
    def record(rank: int) -> None:
        hvd.start_timeline(f"{tmp_path}/")
        train()
        timeline.save(current_world().generation.recorder, current_world().group)

    run_worlds(2, record)
    for rank in range(2):
        part = Destination(f"{tmp_path}/", 2).part_path(rank)
        assert spans(read_part(part), rank, "optimizer 1", "synchronize")
    assert json.loads((tmp_path / "rank0.json").read_text())["distributedInfo"]["rank"] == 0


def test_operations_are_there_by_name(tmp_path):
    path = tmp_path / "timeline.json"

    def record(rank: int) -> None:
        hvd.start_timeline(path)
        world = current_world()
        operation = Operation(ALLREDUCE, lambda execution: execution.group.agree(None, "test"), 'a "name"')
        world.controller.submit(world.group, operation).wait()
        hvd.stop_timeline()

    run_worlds(2, record)
    events = read_events(path)
    assert_rows_are_tidy(events)
    for rank in range(2):
        (execution,) = spans(events, rank, "operations")
        assert execution["name"] == "allreduce of 'a \"name\"'"
        # The name of what it waited for is an argument of the span, because several waits may overlap.
        begin, end = [event for event in events if event["ph"] in "be" and event["pid"] == rank][:2]
        assert (begin["name"], begin["ph"], end["name"], end["ph"]) == (execution["name"], "b", execution["name"], "e")
        assert begin["id"] == end["id"]
        assert begin["ts"] <= end["ts"] <= execution["ts"]


def test_adasum_has_its_rows(tmp_path):
    def record(rank: int) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters()), model.named_parameters(), op=hvd.Adasum
        )
        hvd.start_timeline(tmp_path / "t.json")
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        hvd.stop_timeline()

    run_worlds(2, record)
    events = read_events(tmp_path / "t.json")
    assert_rows_are_tidy(events)
    for rank in range(2):
        assert [span["name"] for span in spans(events, rank, "optimizer 1")] == ["step 1", "synchronize"]
        (combining,) = spans(events, rank, "optimizer 1, bucket 0")
        assert combining["name"] == "the Adasum of the deltas of bias, weight"


def test_what_a_process_set_does_is_there(tmp_path):
    def record(rank: int) -> None:
        some = hvd.add_process_set([0, 2])
        hvd.start_timeline(tmp_path / "t.json")
        if rank != 1:
            for op in (hvd.Average, hvd.Adasum):
                model = copy.deepcopy(MODEL)
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters()), model.named_parameters(), op=op, process_set=some
                )
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            hvd.allreduce(torch.ones(1), name="loss", process_set=some)
        hvd.stop_timeline()

    run_worlds(3, record)
    events = read_events(tmp_path / "t.json")
    for rank, expected in enumerate([1, 0, 1]):
        steps = [len(spans(events, rank, f"optimizer {number}", "step 1")) for number in (1, 2)]
        assert steps == [expected, expected]
        turns = [span["name"] for span in spans(events, rank, "operations")]
        assert ("allreduce of 'loss'" in turns) == bool(expected)


def test_a_timeline_may_follow_another(tmp_path):
    def record(rank: int) -> None:
        for number in range(2):
            hvd.start_timeline(str(tmp_path / f"{number}.json"), mark_cycles=True)
            train()
            hvd.stop_timeline()

    run_worlds(2, record)
    for number in range(2):
        events = read_events(tmp_path / f"{number}.json")
        row = f"optimizer {number + 1}"
        assert len(spans(events, 1, row, "synchronize")) == STEPS
        assert not spans(events, 1, f"optimizer {2 - number}")


def test_nothing_is_recorded_where_none_was_started(monkeypatch):
    def fail(*_: Any) -> None:
        raise AssertionError("something was recorded")

    monkeypatch.setattr(Recorder, "_put", fail)
    run_worlds(2, lambda rank: train())


def test_wrong_use_is_an_error_that_says_so(tmp_path, caplog):
    def misuse(rank: int) -> list[str]:
        errors = []
        for bad in (tmp_path / "nowhere" / "t.json", Path("/dev/null"), f"{tmp_path}/nowhere/traces/", "/dev/null/"):
            with pytest.raises(OSError, match=r"the timeline .* cannot be written on rank 0 \(node0\)") as caught:
                hvd.start_timeline(bad)
            assert str(bad) in str(caught.value)
        for no_path in (None, 3, b"t.json"):
            with pytest.raises(TypeError, match=f"start_timeline: file_path={no_path!r} is not a path"):
                hvd.start_timeline(no_path)
        hvd.stop_timeline()
        hvd.start_timeline(tmp_path / "t.json")
        with pytest.raises(ValueError, match=r"recorded already, to .*t.json"):
            hvd.start_timeline(tmp_path / "u.json")
        hvd.stop_timeline()
        return errors

    with caplog.at_level(logging.INFO, logger="hvdlite"):
        run_worlds(2, misuse)
    assert [record.levelname for record in caplog.records if "no timeline" in record.message] == ["INFO", "INFO"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]


def test_a_disk_that_is_full_at_a_programs_end_is_one_line_of_rank_0(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(timeline, "_LAST_WAIT_S", 60.0)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def record(rank: int) -> None:
        hvd.start_timeline(tmp_path / "t.json")
        train()
        world = current_world()
        timeline.leave(world.generation.recorder, world.group, world.controller)

    monkeypatch.setattr("hvdlite.timeline.write_trace", full)
    run_worlds(2, record)
    (said,) = caplog.messages
    assert "t.json' cannot be written on rank 0 (node0): [Errno 28]" in said
    assert {entry.name for entry in tmp_path.iterdir()} == {"t.json.rank.0.part", "t.json.rank.1.part"}


@pytest.mark.parametrize("call", [lambda: hvd.start_timeline("t.json"), hvd.stop_timeline])
def test_before_init_it_is_the_usual_error(call):
    with pytest.raises(hvd.NotInitializedError, match="Horovod has not been initialized"):
        call()


def test_a_disk_that_is_full_in_the_end_is_an_error_on_every_rank_and_loses_no_part(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def record(rank: int) -> None:
        hvd.start_timeline(tmp_path / "t.json")
        train()
        hvd.stop_timeline()

    monkeypatch.setattr("hvdlite.timeline.write_trace", full)
    outcomes = attempt_worlds(2, record)
    assert ["No space left" in str(outcome) for outcome in outcomes] == [True, True]
    assert len(spans(read_part(tmp_path / "t.json.rank.1.part"), 1, "optimizer 1", "synchronize")) == STEPS


@pytest.mark.parametrize("value", ["{}/t.json", "DYNAMIC"])
def test_a_variable_begins_one_in_init_and_leaving_ends_it(value, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", value.format(tmp_path))
    hvd.init()
    train()
    hvd.shutdown()
    if value == "DYNAMIC":
        assert not list(tmp_path.iterdir())
    else:
        assert len(spans(read_events(tmp_path / "t.json"), 0, "optimizer 1", "synchronize")) == STEPS


def test_a_variable_that_names_no_place_for_a_file_is_an_error_of_init(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDLITE_TIMELINE", str(tmp_path / "nowhere" / "t.json"))
    with pytest.raises(OSError, match=r"nowhere/t\.json' cannot be written on rank 0"):
        hvd.init()
    assert not hvd.is_initialized()


# -- how it ends where the program does not end it


def test_a_world_that_is_left_leaves_its_timeline(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "_LAST_WAIT_S", 60.0)

    def record(rank: int) -> None:
        world = current_world()
        hvd.start_timeline(tmp_path / "t.json")
        train()
        timeline.leave(world.generation.recorder, world.group, world.controller)
        timeline.leave(world.generation.recorder, world.group, world.controller)

    run_worlds(2, record)
    assert len(spans(read_events(tmp_path / "t.json"), 1, "optimizer 1", "synchronize")) == STEPS
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]


def test_what_a_lost_rank_did_is_in_what_the_others_leave(tmp_path, caplog):
    recorded = threading.Barrier(2)

    def record(rank: int) -> None:
        world = current_world()
        hvd.start_timeline(tmp_path / "t.json")
        train()
        if rank == 1:
            # As if the program ended by an exception, or were killed soon after.
            timeline.save(world.generation.recorder, world.group)
            recorded.wait()
            return
        recorded.wait()
        world.group.close()
        timeline.leave(world.generation.recorder, world.group, world.controller)

    run_worlds(2, record)
    assert "may lack events of other ranks" in caplog.text
    events = read_events(tmp_path / "t.json")
    for rank in range(2):
        assert len(spans(events, rank, "optimizer 1", "synchronize")) == STEPS
        assert len(spans(read_part(tmp_path / f"t.json.rank.{rank}.part"), rank, "optimizer 1", "synchronize")) == STEPS


def test_who_is_waited_for_in_vain_is_given_up(tmp_path, monkeypatch, caplog):
    class Never:
        def submit(self, *_: Any) -> Handle:
            return Handle("stop_timeline")

    monkeypatch.setattr(timeline, "_LAST_WAIT_S", 0.01)

    def record(rank: int) -> None:
        hvd.start_timeline(tmp_path / "t.json")
        timeline.leave(current_world().generation.recorder, current_world().group, Never())

    run_worlds(1, record)
    assert "not all ranks ended their programs within 0.01 s" in caplog.text
    assert read_events(tmp_path / "t.json")


def test_a_part_whose_directory_is_on_no_disk_of_its_host_travels_too(tmp_path, monkeypatch):
    part_path = Destination.part_path
    nowhere = Destination(f"{tmp_path}/nowhere/t", 2)
    monkeypatch.setattr(Destination, "part_path", lambda self, rank: part_path(nowhere if rank else self, rank))

    def record(rank: int) -> None:
        hvd.start_timeline(tmp_path / "t.json")
        train()
        hvd.stop_timeline()

    run_worlds(2, record)
    assert len(spans(read_events(tmp_path / "t.json"), 1, "optimizer 1", "synchronize")) == STEPS


# -- clocks


def test_clocks_of_one_host_are_the_same_and_others_are_told_apart():
    hour_ns = 3600 * 10**9

    def measure(group: Group) -> tuple[int, int, int]:
        began_ns = time.monotonic_ns()
        same = clock_ahead_ns(group, "test")
        other = clock_ahead_ns(group, "test", lambda: time.monotonic_ns() + group.rank * hour_ns)
        return same, other, time.monotonic_ns() - began_ns

    for rank, (same, other, took_ns) in enumerate(run_ranks(3, measure)):
        assert same == 0
        assert abs(other - rank * hour_ns) < took_ns


def test_a_clock_that_drifts_is_set_right(tmp_path):
    recorder = Recorder()
    file = open_part(tmp_path / "t.json.rank.0.part")
    recorder.begin(Recording("t.json", file, 0, "rank 0", zero_ns=1000, ahead_ns=0, since_ns=1500))
    recorder.note(Row(1, "row"), "early", 0, 2000)  # it began before the recording
    recorder.note(Row(1, "row"), "late", 101_000, 102_000)
    recorder.end()
    data = (tmp_path / "t.json.rank.0.part").read_bytes()
    (tmp_path / "right").write_bytes(b"[\n" + set_right(data, gained_ns=10_000, over_ns=100_000))
    recorder.forget()
    assert [span["ts"] for span in spans(read_part(tmp_path / "right"), 0)] == [0.45, 90.0]


# -- the recorder


def test_too_many_events_are_said_once_and_not_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "MOST_EVENTS", 3)
    own = Recorder()
    file = open_part(tmp_path / "t.rank.0.part")
    own.begin(Recording("t", file, 0, "rank 0", zero_ns=0, ahead_ns=0, since_ns=0))
    for number in range(10):
        own.note(Row(1, "row"), f"span {number}", number, number)
    own.forget()
    assert caplog.text.count("the timeline is full") == 1
    assert [span["name"] for span in spans(read_part(tmp_path / "t.rank.0.part"), 0)] == ["span 0", "span 1", "span 2"]


def test_events_are_in_the_part_before_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "_FLUSH_S", 0.01)
    own = Recorder()
    file = open_part(tmp_path / "t.rank.0.part")
    own.begin(Recording("t", file, 0, "rank 0", zero_ns=0, ahead_ns=0, since_ns=0))
    own.note_waiting("first", 1, 5)
    own.note_waiting("second", 2, 6)
    with pytest.raises(KeyError), own.span(Row(1, "row"), "failed"):
        raise KeyError
    give_up_at = time.monotonic() + 60
    while (tmp_path / "t.rank.0.part").read_text().count("\n") < 11:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    events = read_part(tmp_path / "t.rank.0.part")
    own.forget()
    waits = [event for event in events if event["ph"] in "be"]
    assert [(event["ph"], event["name"], event["ts"]) for event in waits] == [
        ("b", "first", 0.001), ("e", "first", 0.005), ("b", "second", 0.002), ("e", "second", 0.006),
    ]  # fmt: skip
    assert waits[0]["id"] == waits[1]["id"] != waits[2]["id"]
    assert [span["name"] for span in spans(events, 0)] == ["failed"]


def test_a_step_brings_what_came_before_it_into_the_part_whatever_the_clock_says(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "_FLUSH_S", 1000)
    own = Recorder()
    file = open_part(tmp_path / "t.rank.0.part")
    own.begin(Recording("t", file, 0, "rank 0", zero_ns=0, ahead_ns=0, since_ns=0))
    give_up_at = time.monotonic() + 60
    for step in range(3):
        own.note(Row(1, "row"), f"step {step}", step, step + 1)
        own.write_soon()
        while f"step {step}" not in (tmp_path / "t.rank.0.part").read_text():
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
    own.forget()


class NearlyFull:
    """A file on a disk with this many bytes left, which accepts a few at a time."""

    def __init__(self, left: int) -> None:
        self.left, self.data, self.refused = left, b"", 0

    def write(self, data: memoryview) -> int:
        if self.left == 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data[: min(self.left, 7)])
        self.data += taken
        self.left -= len(taken)
        return len(taken)

    def close(self) -> None: ...


def test_a_disk_that_fills_up_ends_the_timeline_with_one_line_and_keeps_what_was_written(tmp_path, caplog):
    file: Any = NearlyFull(600)
    own = Recorder()
    own.begin(Recording("t", file, 0, "rank 0", zero_ns=0, ahead_ns=0, since_ns=0))
    give_up_at = time.monotonic() + 60
    for step in range(100):
        own.note(Row(1, "row"), f"step {step}", step, step + 1)
        own.write_soon()
    while not file.refused:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
    for step in range(100):
        own.note(Row(1, "row"), f"step {100 + step}", step, step + 1)
        own.write_soon()
    own.forget()
    assert file.refused == 1
    (said,) = caplog.messages
    assert said.startswith("the timeline t gets no more events of this rank")
    assert "No space left on device" in said
    kept = [json.loads(event)["name"] for event in events_of(file.data) if '"ph":"X"' in event]
    assert kept == [f"step {step}" for step in range(len(kept))]
    assert kept


def test_a_line_that_was_cut_short_is_left_out():
    assert events_of(b'[\n{"a": 1},\n{"b": 2},\n{"c"') == ['{"a": 1}', '{"b": 2}']


def test_a_part_finds_a_place_where_its_directory_is_not(tmp_path):
    with open_part(tmp_path / "nowhere" / "t") as file:
        assert file.write(b"x") == 1


def test_points_of_a_gpu_are_seen_in_order_and_settled():
    class Point:
        def synchronize(self) -> None:
            seen.append(self)

    seen: list[Point] = []
    times: list[tuple[int, int]] = []
    watch = GpuClock()
    points = [Point() for _ in range(4)]
    watch.settle()
    watch.see(points[0], points[1], lambda *pair: times.append(pair))
    watch.see(points[2], points[3], lambda *pair: times.append(pair))
    watch.settle()
    assert seen == points
    assert len(times) == 2
    assert sorted(time_ns for pair in times for time_ns in pair) == [time_ns for pair in times for time_ns in pair]
