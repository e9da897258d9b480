"""Operations of several ranks over real connections: pairing by name, one order, errors on every rank, and the end."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from control_messages import from_rank_0
from copied_ranks import RankServer
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite import forks
from hvdlite.calls import handle, mailbox
from hvdlite.calls.handle import Handle
from hvdlite.calls.operation import Execution, Kind, Operation
from hvdlite.comm.work import CollectiveWatch, Work
from hvdlite.control import rank0_connection, reports
from hvdlite.control.control_client import ControlClient
from hvdlite.coordinator import coordinator, negotiation, stall
from hvdlite.environment import Environment
from hvdlite.log import log
from hvdlite.runtime.world import World, current_world
from hvdlite.signing import Signer


@pytest.fixture
def launched(rank_server: RankServer) -> Callable[[str], list[str]]:
    """Returns the lines that each of two processes of a job printed, in order."""

    def launch(program: str) -> list[str]:
        job = subprocess.run(
            [sys.executable, *rank_server.launcher(), "-np", "2", sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert job.returncode == 0, job.stderr
        return [line.partition(":")[2] for line in sorted(job.stdout.splitlines())]

    return launch


def total(value: int, execution: Execution) -> int:
    """The body of an operation that sums the values of all ranks; the sum shows which ranks were paired."""
    tensor = torch.tensor([value])
    execution.group.all_reduce(tensor, execution.what).wait()
    return int(tensor)


def add_up(name: str | None, value: int, world: World | None = None, **same) -> Handle:
    world = world or current_world()
    return world.controller.submit(world.group, Operation(Kind("add_up"), partial(total, value), name, same, own=value))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_operations_that_ranks_call_in_different_orders_pair_up_by_their_names(size):
    numbers = range(40)

    def rank(own: int) -> list[int]:
        order = list(numbers)
        random.Random(own).shuffle(order)
        handles = {number: add_up(str(number), 10**number % 997 + own) for number in order}
        return [handles[number].wait() for number in numbers]

    expected = [size * (10**number % 997) + sum(range(size)) for number in numbers]
    assert run_worlds(size, rank) == [expected] * size


def test_an_error_of_a_body_is_raised_where_its_handle_is_waited_for_and_the_next_operation_goes_on():
    def broken(execution: Execution) -> None:
        raise KeyError("nothing here")

    def rank(own: int) -> int:
        world = current_world()
        handle = world.controller.submit(world.group, Operation(Kind("broken"), broken))
        with pytest.raises(KeyError, match="nothing here"):
            handle.wait()
        return add_up("a", 1).wait()

    assert run_worlds(2, rank) == [2, 2]


def test_a_name_that_is_under_way_already_is_refused_in_horovods_words():
    def rank(own: int) -> int:
        first = add_up("a", 1)
        if own == 0:
            with pytest.raises(ValueError, match="same name as another tensor that is currently being processed"):
                add_up("a", 1)
        hvd.barrier()
        return first.wait()

    def alone(own: int) -> int:
        # Rank 1 has not called it yet, so rank 0's must still be in progress.
        return rank(own) if own == 0 else (hvd.barrier(), add_up("a", 1).wait())[1]

    # Rank 0 calls the barrier after its first operation, which rank 1 joins only after the barrier.
    assert run_worlds(2, alone) == [2, 2]


def test_ranks_that_differ_get_one_error_and_can_go_on():
    def rank(own: int) -> int:
        with pytest.raises(hvd.MismatchError, match=r"Mismatched data types: One rank had type x, but another .* y"):
            add_up("a", 1, dtype="xy"[own]).wait()
        return add_up("a", 1, dtype="x").wait()

    assert run_worlds(2, rank) == [2, 2]


def test_a_rank_that_waits_for_one_that_has_ended_is_told_so():
    first, second, third = attempt_worlds(3, lambda rank: None if rank == 1 else hvd.barrier())
    assert second is None
    for outcome in (first, third):
        with pytest.raises(hvd.CommunicationError, match=r"Horovod has been shut down\..* rank 1 \(node1\) has ended"):
            raise outcome


def test_the_others_are_told_when_rank_0_has_ended():
    _, second = attempt_worlds(2, lambda rank: None if rank == 0 else hvd.barrier())
    with pytest.raises(hvd.CommunicationError, match=r"rank 0 \(node0\) has ended"):
        raise second


@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_whose_connection_breaks_is_lost_to_the_others(lost):
    def rank(own: int) -> None:
        hvd.barrier()
        if own == lost:
            # As when its process is killed: the connection is closed without a message.
            current_world().controller._connection._mailbox.hang_up()
            return
        with pytest.raises(
            hvd.PeerLostError, match=rf"rank {lost} \(node{lost}\) has crashed or was killed: look for that"
        ):
            hvd.barrier()

    run_worlds(3, rank)


@pytest.mark.parametrize("gone_on", [0, 2])
def test_a_rank_that_goes_on_elsewhere_since_another_was_lost_is_a_loss_to_those_that_have_not_heard(gone_on):
    def rank(own: int) -> None:
        hvd.barrier()
        if own == gone_on:
            current_world().controller.revoke("worker 3 was killed by SIGKILL")
            current_world().controller.close()
            return
        with pytest.raises(hvd.PeerLostError, match=r"has ended|has crashed or was killed"):
            hvd.barrier()

    run_worlds(3, rank)


def test_nothing_can_be_asked_for_after_the_end():
    def rank(own: int) -> None:
        world = current_world()
        hvd.barrier()
        world.controller.close()
        # Unless the other rank was faster, so that its end was received first.
        with pytest.raises(hvd.CommunicationError, match=r"hvd.shutdown\(\) was called|has ended"):
            add_up("a", 1).wait()

    run_worlds(2, rank)


def test_who_waits_for_an_operation_when_shutdown_is_called_is_let_go():
    def rank(own: int) -> None:
        if own == 0:
            handle = add_up("a", 1)
            closing = threading.Thread(target=current_world().controller.close)
            closing.start()
            with pytest.raises(hvd.CommunicationError, match="Horovod has been shut down"):
                handle.wait()
            closing.join()

    run_worlds(2, rank)


def test_waiting_burns_no_core():
    # A collection that happens to begin in the waiting thread takes part of a second.
    gc.disable()
    come = threading.Event()

    def rank(own: int) -> float:
        hvd.barrier()
        if own == 1:
            come.wait(3)
        before_s = time.thread_time()
        hvd.barrier()
        return time.thread_time() - before_s

    try:
        # A thread that is busy takes at least this of three seconds, with ten others beside it on two cores.
        assert run_worlds(2, rank)[0] < 0.5
    finally:
        gc.enable()


def test_many_operations_under_way_at_once_are_looked_through_now_and_then_and_not_with_every_message(monkeypatch):
    ticks = []
    tick = negotiation.Negotiation.tick
    monkeypatch.setattr(negotiation.Negotiation, "tick", lambda self, now_s: ticks.append(tick(self, now_s)))
    monkeypatch.setattr(coordinator, "_TICK_S", 1000.0)

    def rank(own: int) -> int:
        return sum(handle.wait() for handle in [add_up(str(number), 1) for number in range(100)])

    assert run_worlds(2, rank) == [200, 200]
    assert len(ticks) <= 1


def test_a_rank_whose_other_thread_may_still_call_is_not_stuck(monkeypatch):
    for module, seconds in ((handle, "_PATIENCE_S"), (negotiation, "SETTLING_S"), (coordinator, "_TICK_S")):
        monkeypatch.setattr(module, seconds, 0.02)
    # Each rank's first thread waits for an operation that the other's second thread calls only when it is told to.
    go = threading.Event()

    def rank(own: int) -> list[int]:
        names = ["a", "b"] if own == 0 else ["b", "a"]
        world = current_world().here
        has_called = threading.Event()

        def second() -> None:
            add_up(f"warm up {own}", 0, world)
            has_called.set()
            go.wait()
            results.append(add_up(names[1], 1, world).wait())

        results: list[int] = []
        thread = threading.Thread(target=second)
        thread.start()
        assert has_called.wait(60)
        waiting = add_up(names[0], 1)
        if own == 1:
            # Long enough for an error to arrive, if there were one.
            waiting.ended_within(0.3)
            go.set()
        results.append(waiting.wait())
        thread.join()
        return results

    assert run_worlds(2, rank) == [[2, 2], [2, 2]]


@pytest.mark.slow
def test_a_rank_all_of_whose_threads_wait_is_stuck():
    all_have_called = threading.Barrier(4)

    def rank(own: int) -> list[type]:
        world = current_world().here

        def wait_for(name: str) -> None:
            handle = add_up(name, 1, world)
            # An error of those that have called is no error of one that calls later.
            all_have_called.wait(60)
            with pytest.raises(hvd.MismatchError):
                handle.wait()
            seen.append(name)

        seen: list[str] = []
        threads = [threading.Thread(target=wait_for, args=(f"{own} {number}",)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(seen)

    assert run_worlds(2, rank) == [["0 0", "0 1"], ["1 0", "1 1"]]


def test_a_handle_is_a_number_unlike_any_other_and_gives_its_result_as_often_as_one_asks():
    def rank(own: int) -> tuple[int, int]:
        first, second = add_up("a", 1), add_up("b", 2)
        assert isinstance(first, int)
        assert {first: "x", second: "y"}[int(first)] == "x"
        return first.wait() + first.wait(), second.wait()

    assert run_worlds(2, rank) == [(4, 4)] * 2


def test_a_stalled_operation_is_told_of_and_ended_where_that_is_asked_for(caplog, monkeypatch):
    # On a busy machine rank 0 may not answer in so short a time, which would end this process.
    monkeypatch.setattr(reports.Heartbeat, "silence", lambda self, now_s: None)
    environment = Environment(stall_warning_s=0.1, stall_shutdown_s=0.3)
    come = threading.Event()
    # Behind it rank 1 has told rank 0 its pid.
    here = threading.Barrier(2)

    def rank(own: int) -> None:
        here.wait(60)
        if own == 1:
            come.wait()
            return
        try:
            with pytest.raises(
                hvd.CommunicationError, match=r"stalled: add_up of 'a'.* missing: rank 1 \(node1, pid \d+\)"
            ):
                add_up("a", 1).wait()
        finally:
            come.set()

    with caplog.at_level(logging.WARNING, "hvdlite"):
        run_worlds(2, rank, environment)


def test_where_a_missing_ranks_thread_is_comes_from_its_own_frames(caplog):
    environment = Environment(stall_warning_s=1.5, stall_shutdown_s=60.0)
    told = threading.Event()

    class Look(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "in keep_them_waiting (threading.Event.wait)" in record.getMessage():
                told.set()

    def keep_them_waiting() -> None:
        assert told.wait(50)

    def rank(own: int) -> int:
        add_up("first", 1).wait()
        if own == 1:
            keep_them_waiting()
        return add_up("a", 1).wait()

    look = Look()
    log.addHandler(look)
    try:
        assert run_worlds(2, rank, environment) == [2, 2]
    finally:
        log.removeHandler(look)
    assert re.search(r"missing: rank 1 \(node1, pid \d+\), which is at \S*test_controller.py:\d+ in keep_", caplog.text)


MANY = int(os.environ.get("TEST_HVDLITE_OUTSTANDING", "2000"))


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_any_number_of_operations_may_be_outstanding(named):
    def rank(own: int) -> int:
        # Names long enough to fill any socket's buffer many times over.
        names = [f"{number} {'x' * 1500}" if named else None for number in range(MANY)]
        if own == 0 and named:
            names.reverse()
        return sum(handle.wait() for handle in [add_up(name, 1) for name in names])

    assert run_worlds(2, rank) == [2 * MANY] * 2


@pytest.mark.slow
@pytest.mark.parametrize("holder", [0, 1])
def test_an_interpreter_that_is_held_while_operations_are_asked_for_loses_none(launched, holder):
    # The whole process is stopped, with the threads that listen, for longer than any of their timeouts once was.
    program = f"""
        import ctypes, torch, hvdlite as hvd
        hvd.init()
        usleep = ctypes.PyDLL(None).usleep
        handles = []
        for number in range(600):
            handles.append(hvd.allreduce_async(torch.ones(2000), name=f"{{number}} {{'x' * 2000}}", op=hvd.Sum))
            if hvd.rank() == {holder} and number in (100, 400):
                usleep(1_500_000)
        print(sum(hvd.synchronize(handle)[0].item() for handle in handles))
    """
    assert launched(program) == ["1200.0"] * 2


def test_a_rank_hears_of_others_while_it_is_blocked_in_an_operation():
    may_end = threading.Event()
    both_are_in_it, both_have_heard = threading.Barrier(3), threading.Barrier(2)

    def rank(own: int) -> None:
        world = current_world()
        if own == 2:
            both_are_in_it.wait(60)
            # It ends while the others are in an operation in which it has no part.
            return
        member = world.group.among([0, 1], set_id=1, token="a set of the test's")
        world.controller.open_group(member)
        handle = world.controller.submit(member, Operation(Kind("blocked"), lambda execution: may_end.wait(60)))
        while world.controller._executor.current is None:
            time.sleep(0.01)
        both_are_in_it.wait(60)
        with pytest.raises(hvd.CommunicationError, match=r"rank 2 \(node2\) has ended"):
            hvd.barrier()
        assert not handle.is_ended()
        both_have_heard.wait(60)
        may_end.set()
        assert handle.wait() is True

    run_worlds(3, rank)


def test_a_peer_that_hangs_in_what_all_have_begun_is_told_of(caplog, monkeypatch):
    monkeypatch.setattr(rank0_connection, "LOOK_S", 0.05)
    monkeypatch.setattr(reports, "LOOK_S", 0.05)
    # What may take long on a busy machine: both ranks come to the operation, and rank 0 answers.
    monkeypatch.setattr(stall.StallWatch, "_find_operations", lambda self, stalls, now_s: None)
    monkeypatch.setattr(reports.Heartbeat, "silence", lambda self, now_s: None)
    told, both_are_in_it = threading.Event(), threading.Barrier(2)
    ended: list[str] = []

    def end(self, words: str) -> None:
        ended.append(words)
        told.set()

    monkeypatch.setattr(reports.WaitReports, "end_process", end)

    def rank(own: int) -> None:
        world = current_world()

        def body(execution: Execution) -> None:
            both_are_in_it.wait(60)
            # Rank 1 does not enter the collective within the operation.
            if own == 1:
                told.wait(60)
            execution.group.all_reduce(torch.ones(1), execution.what).wait()

        world.controller.submit(world.group, Operation(Kind("halves"), body, "a")).wait()

    with caplog.at_level(logging.WARNING, "hvdlite"):
        run_worlds(2, rank, Environment(stall_warning_s=0.2, stall_shutdown_s=0.8))
    assert re.search(r"stalled: .*rank.* 0 \(node0, pid \d+\).* waited \d+ s in halves of 'a'", caplog.text)
    assert "in halves of 'a'" in ended[0]


def test_a_rank_in_an_operation_while_another_is_in_a_bucket_gets_its_error(monkeypatch):
    def rank(own: int) -> None:
        world = current_world()
        buckets = world.group.duplicate()
        for _ in range(3):
            buckets.all_reduce(torch.ones(1), "a bucket").wait()
        if own == 0:
            with pytest.raises(hvd.MismatchError, match=r"rank 0 .*: add_up of .*; rank 1 .*: a bucket"):
                add_up("a", 1).wait()
        # The operation for which rank 1 waits is called only then.
        buckets.all_reduce(torch.ones(1), "a bucket").wait()

    run_worlds(2, rank, Environment())


def test_a_bucket_that_is_slow_on_its_way_is_no_mismatch(monkeypatch):
    # The intervals are short here: ranks report and rank 0 checks many times while the bucket is reduced.
    monkeypatch.setattr(rank0_connection, "LOOK_S", 0.02)
    monkeypatch.setattr(reports, "LOOK_S", 0.02)
    monkeypatch.setattr(coordinator, "_TICK_S", 0.02)
    monkeypatch.setattr(negotiation, "SETTLING_S", 0.1)
    ticks: list[float] = []
    tick = negotiation.Negotiation.tick

    class Slow:
        """A collective that ends only after rank 0 has checked fifty times for stalls."""

        def __init__(self, work) -> None:
            self.work = work

        def wait(self) -> None:
            seen = len(ticks)
            while len(ticks) < seen + 50:
                time.sleep(0.01)
            self.work.wait()

    def noted(self, now_s: float) -> None:
        ticks.append(now_s)
        tick(self, now_s)

    monkeypatch.setattr(negotiation.Negotiation, "tick", noted)

    def rank(own: int) -> int:
        buckets = current_world().group.duplicate()
        work = buckets.all_reduce(torch.ones(1), "a bucket")
        if own == 1:
            work._work = Slow(work._work)
            work.wait()
        return add_up("a", 1).wait()

    assert run_worlds(2, rank, Environment()) == [2, 2]


def test_what_each_thread_is_blocked_in_is_known_apart():
    watch = CollectiveWatch()
    release, inside = threading.Event(), threading.Barrier(3)

    class Engines:
        def wait(self) -> None:
            inside.wait(60)
            release.wait(60)

    def wait_in(what: str) -> None:
        Work(Engines(), what, watch, lambda what, error: AssertionError()).wait()

    threads = [threading.Thread(target=wait_in, args=(what,)) for what in ("one", "another")]
    for thread in threads:
        thread.start()
    inside.wait(60)
    blocked = watch.blocked()
    assert {blocked[thread.ident][0] for thread in threads} == {"one", "another"}
    release.set()
    for thread in threads:
        thread.join()
    assert watch.blocked() == {}


def test_a_message_that_cannot_be_sent_is_its_operations_error_alone(monkeypatch):
    both = threading.Barrier(2)

    def rank(own: int) -> int:
        hvd.barrier()
        # For both ranks, as they are in one process.
        if own == 0:
            monkeypatch.setattr(mailbox, "MAX_BYTES", 2000)
        both.wait(60)
        with pytest.raises(hvd.CommunicationError, match=r"add_up of 'x+' cannot be sent to rank 0: a message of"):
            add_up("x" * 2000, 1).wait()
        hvd.barrier()
        return add_up("a", 1).wait()

    assert run_worlds(2, rank) == [2, 2]


def test_without_the_check_operations_are_carried_out_at_once():
    def rank(own: int) -> list[object]:
        assert add_up("a", own).is_ended()
        with pytest.raises(RuntimeError, match="HVDLITE_CHECK"):
            current_world().controller.join(
                average_of_active=False, stand_in=lambda kind, same: lambda execution: None, sit_out=lambda *_: None
            )
        return [add_up("a", own).wait(), hvd.barrier()]

    assert run_worlds(3, rank, Environment(check=False)) == [[3, None]] * 3


@pytest.mark.parametrize("answer", ["go", "no"])
def test_an_answer_that_comes_after_a_rank_was_revoked_is_ignored(answer):
    """Its requests have failed, but rank 0 may have answered them before it heard of that."""
    messages = {"go": [[True, True], 2], "no": ["MismatchError", "they differ"]}

    def rank_1(client: ControlClient) -> None:
        request = add_up("a", 1)
        client.revoke("this world is over")
        with pytest.raises(hvd.PeerLostError, match="this world is over"):
            request.wait()
        client.take(from_rank_0(answer, int(request), *messages[answer]))
        with pytest.raises(KeyError):
            client.take(from_rank_0(answer, int(request) + 1000, *messages[answer]))

    _while_rank_0_asks_for_nothing(rank_1)


def test_what_rank_0_writes_about_a_join_after_a_rank_was_revoked_is_ignored():
    def rank_1(client: ControlClient) -> None:
        joining = client.join(average_of_active=False, stand_in=lambda *_: lambda _: None, sit_out=lambda *_: None)
        client.revoke("this world is over")
        with pytest.raises(hvd.PeerLostError, match="this world is over"):
            joining.wait()
        for about_its_join in (
            ["stand_in", 0, [True, None], 1, "allreduce", "'b'", {}],
            ["sit_out", 0, [1]],
            ["joined", 0],
            ["not_joined", "CommunicationError", "a rank has ended"],
        ):
            client.take(from_rank_0(*about_its_join))

    _while_rank_0_asks_for_nothing(rank_1)


def _while_rank_0_asks_for_nothing(function: Callable[[ControlClient], None]) -> None:
    """Calls ``function`` with the controller of rank 1 of 2, whose requests and join rank 0 leaves unanswered."""
    is_done = threading.Event()

    def rank(own: int) -> None:
        hvd.barrier()
        if own == 0:
            # Its end would be an answer.
            assert is_done.wait(60)
            return
        try:
            function(current_world().controller)
        finally:
            is_done.set()

    run_worlds(2, rank)


def test_connections_that_come_and_go_leave_no_hook_and_are_not_remembered(monkeypatch):
    hooks = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hook: hooks.append(hook))
    before = set(forks._inherited)
    for closes in (True, False):
        ends = list(mailbox.mailbox_pair(Signer(b"a session")))
        assert set(forks._inherited) - before == set(ends)
        for end in ends:
            if closes:
                end.close()
        del ends, end
    gc.collect()
    for end in mailbox.mailbox_pair(Signer(b"a session")):
        end.close()
    del end
    assert not hooks
    assert set(forks._inherited) <= before


def test_a_forked_child_does_not_hold_the_connections():
    def rank(own: int) -> None:
        hvd.barrier()
        mailbox = current_world().controller._connection._mailbox
        child = os.fork()
        if child == 0:
            os._exit(0 if mailbox.fileno() == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    run_worlds(2, rank)


def test_shutdown_does_not_wait_for_forked_children():
    children = []

    def rank(own: int) -> None:
        hvd.barrier()
        child = os.fork() if own == 0 else None
        if child == 0:
            # Like a DataLoader's worker; not for ever, so that a wait for it is seen.
            time.sleep(60)
            os._exit(0)
        if child is not None:
            children.append(child)
        hvd.barrier()

    run_worlds(2, rank)
    (child,) = children
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child was waited for"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
