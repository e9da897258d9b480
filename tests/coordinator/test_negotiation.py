"""The rules by which operations start or are refused, tested without connections and with simulated time."""

from __future__ import annotations

import itertools

import pytest
from control_messages import sent
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.calls.messages import AskLine, LivingOptimizers, OperationRequest, Pinned
from hvdlite.coordinator.negotiation import SETTLING_S, Negotiation
from hvdlite.coordinator.scene import BlockedThread, Pending
from hvdlite.coordinator.stall import StallRules

CAUSES = ("`if hvd.rank() == 0:`", "different numbers of batches (see hvd.join())")

HOSTS = ("node1", "node1", "node2", "node2")
ALL = (0, 1, 2, 3)


class Play:
    """Ranks that send messages to a negotiation, at times that the test chooses."""

    def __init__(self, size: int = 3, **stall: float) -> None:
        self.size = size
        self.now_s = 0.0
        self._tickets = itertools.count()
        self.what_of: dict[tuple[int, int], str | None] = {}
        self.negotiation = Negotiation(HOSTS[:size], StallRules(**stall))

    def ask(
        self, rank: int, name: str | None, kind: str = "allreduce", *, members=None, own=None, set_id=0, **same
    ) -> int:
        """Asks for an operation and returns the ticket."""
        ranks = tuple(range(self.size)) if members is None else members
        ticket = next(self._tickets)
        ask = OperationRequest(ticket, set_id, kind, name, f"{kind} of {name!r}", ranks, same, own)
        self.what_of[rank, ticket] = name
        self.negotiation.ask(rank, ask, self.now_s)
        return ticket

    def call(self, rank: int, name: str, kind: str = "allreduce", *, begun=0, **more) -> None:
        """Asks for an operation and waits for it, after this many buckets were begun."""
        self.negotiation.wait(rank, self.ask(rank, name, kind, **more), {"buckets": begun})

    def busy(
        self, rank: int, what: str | None, since_s: float, *, is_operation=False, is_stuck=True, bucket=None
    ) -> None:
        """Reports the operation in which the rank has been blocked, or None; ``bucket`` is the number of its bucket."""
        place = None if bucket is None else ("buckets", bucket, tuple(range(self.size)))
        blocked = [] if what is None else [BlockedThread(what, since_s, is_operation, place)]
        self.negotiation.busy(rank, blocked, is_stuck=is_stuck, begun={"buckets": bucket or 0})

    def after(self, seconds: float) -> list[tuple[int, list]]:
        self.now_s += seconds
        self.negotiation.tick(self.now_s)
        return self.said()

    def begun(self) -> list[list[str | None]]:
        """Returns the names of the operations that have started, in order, by rank."""
        said = self.said()
        return [[self.what_of[rank, message[1]] for to, message in said if to == rank] for rank in range(self.size)]

    def asked_where(self) -> list[int]:
        """Returns the ranks that were asked for their program's line since the last call; each is to answer."""
        asked = [rank for rank, message in self.negotiation.outbox if message == AskLine()]
        self.negotiation.outbox = [each for each in self.negotiation.outbox if each[1] != AskLine()]
        return asked

    def said(self) -> list[tuple[int, list]]:
        """Returns what was answered since the last call."""
        said = [(rank, message) for rank, message in self.outbox() if message[0] not in ("left", "where")]
        self.negotiation.outbox.clear()
        return said

    def outbox(self) -> list[tuple[int, list]]:
        return [(rank, sent(message)) for rank, message in self.negotiation.outbox]

    @property
    def is_idle(self) -> bool:
        """Whether no operation is pending, and no rank reports being blocked."""
        scene = self.negotiation.scene
        return not (scene.pending or self.negotiation._refused or scene.busy)


def kinds(said) -> list[tuple[int, str]]:
    return [(rank, message[0]) for rank, message in said]


def refusals(said) -> dict[int, tuple[str, str]]:
    """Returns the error's class and words, by rank."""
    assert all(message[0] in ("no", "not_joined") for _, message in said), said
    return {rank: (message[-2], message[-1]) for rank, message in said}


def one_error(said, ranks) -> tuple[str, str]:
    """Returns the error that exactly these ranks got, all in the same words."""
    told = refusals(said)
    assert sorted(told) == sorted(ranks)
    assert len(set(told.values())) == 1
    return next(iter(told.values()))


def test_an_operation_begins_when_the_last_rank_has_asked_for_it_and_everybody_learns_everybodys_own():
    play = Play()
    for rank in (2, 0):
        play.ask(rank, "a", own=rank * 10)
    assert play.said() == []
    play.ask(1, "a", own=10)
    assert [(rank, [kind, *rest]) for rank, (kind, _, *rest) in play.said()] == [
        (rank, ["go", [0, 10, 20], 3]) for rank in range(3)
    ]
    assert play.is_idle


def test_a_rank_can_be_told_who_has_not_asked_for_what_it_has():
    play = Play(size=4)

    def missing(rank: int) -> list:
        return sent(play.negotiation.missing(rank))[1]

    first, second = play.ask(0, "a"), play.ask(0, "b", members=(0, 3), set_id=1)
    assert missing(0) == [[first, [1, 2, 3], 3], [second, [3], 1]]
    assert missing(1) == []
    of_rank_1 = play.ask(1, "a")
    play.negotiation.join(2, average_of_active=False, now_s=0.0)
    assert (missing(0)[0], missing(1)) == ([first, [3], 1], [[of_rank_1, [3], 1]])
    play.ask(3, "a")
    assert (missing(0), missing(1)) == ([[second, [3], 1]], [])


def test_of_many_that_have_not_asked_the_first_are_told_and_how_many_there_are():
    negotiation = Negotiation(("node1",) * 100, StallRules())
    negotiation.ask(7, OperationRequest(1, 0, "allreduce", "a", "allreduce of 'a'", tuple(range(100)), {}, None), 0.0)
    assert sent(negotiation.missing(7)) == ["alive", [[1, [0, 1, 2, 3, 4, 5, 6, 8], 99]]]


@pytest.mark.parametrize(
    ("key", "one", "another", "words"),
    [
        ("dtype", "float32", "float64", "Mismatched data types: One rank had type float32, but another rank had type "),
        (
            "shape",
            [2],
            [3],
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2], but another rank ",
        ),
        ("device", "cpu", "cuda", "Mismatched ALLREDUCE CPU/GPU device selection"),
        ("op", "Sum", "Min", "Mismatched reduction operation"),
        ("root_rank", 0, 1, "Mismatched ALLREDUCE root ranks"),
        ("prescale_factor", 1.0, 2.0, "Mismatched prescale and/or postscale factors"),
        ("postscale_factor", 1.0, 2.0, "Mismatched prescale and/or postscale factors"),
        ("ranks", [0], [1], "Mismatched ranks"),
    ],
)
def test_ranks_that_ask_for_different_things_under_one_name_all_get_one_error_that_says_who_did_what(
    key, one, another, words
):
    play = Play()
    play.ask(0, "a", **{key: one})
    play.ask(1, "a", **{key: another})
    assert play.said() == []
    play.ask(2, "a", **{key: one})
    error, text = one_error(play.said(), [0, 1, 2])
    assert error == "MismatchError"
    assert text.startswith(words)
    assert f"(allreduce of 'a': ranks 0 (node1), 2 (node2): {one}; rank 1 (node1): {another})" in text
    assert play.is_idle


def test_a_difference_is_told_without_waiting_for_ranks_that_do_not_come_and_again_to_those_that_do():
    play = Play()
    play.ask(0, "a", shape=[1])
    play.ask(1, "a", shape=[2])
    assert play.after(SETTLING_S / 2) == []
    _, text = one_error(play.after(SETTLING_S), [0, 1])
    play.ask(2, "a", shape=[1])
    assert one_error(play.said(), [2])[1] == text
    assert play.is_idle


DIFFERENT_CALLS = {
    "operation": {"kind": "allgather", "name": "a"},
    "name": {"name": "b"},
    "process set": {"name": "a", "set_id": 1, "members": (0, 1)},
}


@pytest.mark.parametrize("what", DIFFERENT_CALLS)
def test_ranks_that_wait_for_each_other_get_one_error(what):
    play = Play(2)
    play.call(0, "a")
    play.call(1, **DIFFERENT_CALLS[what])
    assert play.after(0.0) == []
    error, text = one_error(play.after(SETTLING_S), [0, 1])
    assert error == "MismatchError"
    assert text.startswith(f"Mismatched {what}")
    assert "rank 0 (node1)" in text
    assert "rank 1 (node1)" in text
    assert [cause in text for cause in CAUSES] == [what != "process set"] * 2


def test_of_tensors_that_differ_the_cause_follows_from_whether_calls_have_names():
    for named, expected in ((True, ["drop_last=True"]), (False, CAUSES)):
        play = Play(2)
        for rank in range(2):
            ticket = rank
            what = "allreduce of 'loss'" if named else "allreduce"
            ask = OperationRequest(
                ticket, 0, "allreduce", "loss" if named else None, what, (0, 1), {"shape": [rank]}, None
            )
            play.negotiation.ask(rank, ask, 0.0)
        _, text = one_error(play.said(), [0, 1])
        assert all(each in text for each in expected), text
        assert ("rank() == 0" in text) == (not named)
    play = Play(2)
    for rank in range(2):
        play.ask(rank, "a", dtype=f"float{32 << rank}")
    assert "Most often" not in one_error(play.said(), [0, 1])[1]


def test_who_waits_for_a_rank_that_has_ended_is_told_the_commonest_causes():
    play = Play(2)
    play.call(0, "a")
    play.negotiation.end(1, True, 0.0)
    _, text = one_error(play.said(), [0])
    assert all(cause in text for cause in CAUSES)


def test_a_rank_that_comes_later_to_what_others_were_refused_gets_their_error():
    play = Play(3)
    play.call(0, "a")
    play.call(1, "b")
    play.after(0.0)
    one_error(play.after(SETTLING_S), [0, 1])
    play.call(2, "a")
    one_error(play.said(), [2])
    assert play.is_idle


def test_operations_without_a_name_pair_up_by_what_ranks_still_have_to_call_and_not_by_how_often_they_have():
    play = Play(2)
    # One rank has called it once more than the other, and both got the error.
    play.call(0, None, "barrier")
    play.call(1, None, "allgather")
    play.after(0.0)
    one_error(play.after(SETTLING_S), [0, 1])
    for kind in ("barrier", "allgather", "barrier"):
        for rank in range(2):
            play.call(rank, None, kind)
        assert kinds(play.said()) == [(0, "go"), (1, "go")]


def test_operations_without_a_name_still_pair_up_after_others_have_gone_on_without_those_that_joined():
    play = Play(2)
    play.negotiation.join(0, False, 0.0)
    for _ in range(3):
        play.call(1, None)
    play.negotiation.join(1, False, 0.0)
    play.said()
    for rank in range(2):
        play.call(rank, None)
    assert kinds(play.said()) == [(0, "go"), (1, "go")]


def test_numbers_that_are_none_do_not_differ_from_themselves():
    play = Play(2)
    for rank in range(2):
        play.ask(rank, "a", prescale_factor=float("nan"))
    assert kinds(play.said()) == [(0, "go"), (1, "go")]


def test_groups_of_different_numbers_of_tensors_are_told_apart_by_their_numbers():
    play = Play(2)
    for rank in range(2):
        play.ask(rank, "a", "grouped_allreduce", dtype=["float32"] * (rank + 1))
    _, text = one_error(play.said(), [0, 1])
    assert text.startswith("Mismatched numbers of tensors in GROUPED_ALLREDUCE.")
    assert "rank 0 (node1): 1 tensors; rank 1 (node1): 2 tensors" in text


BUCKET = "the all-reduce of the gradients of fc.weight"


def test_a_circle_through_a_bucket_that_who_waits_elsewhere_has_not_begun_is_an_error_within_seconds():
    play = Play(3, warn_after_s=60.0)
    play.busy(0, BUCKET, 0.0, bucket=5)
    for _ in range(20):
        assert play.after(1.0) == []  # the other ranks compute
    for rank in (1, 2):
        play.call(rank, "a", "allgather", begun=4)
    play.after(0.0)
    _, text = one_error(play.after(SETTLING_S), [1, 2])
    assert f"rank 0 (node1): {BUCKET}; ranks 1 (node1), 2 (node2): allgather" in text
    assert all(cause in text for cause in CAUSES)


def test_one_rank_that_has_not_begun_the_bucket_suffices_and_others_may_compute_or_have_joined():
    play = Play(3, warn_after_s=60.0)
    play.negotiation.join(2, False, 0.0)
    play.busy(0, BUCKET, 0.0, bucket=5)
    play.call(1, "a", begun=4)
    play.after(0.0)
    one_error(play.after(SETTLING_S), [1])


def test_a_bucket_that_all_have_begun_is_on_its_way_however_long_that_takes():
    play = Play(2, warn_after_s=1000.0)
    play.busy(0, BUCKET, 0.0, bucket=5)
    play.call(1, "a", begun=5)
    for _ in range(500):
        assert play.after(1.0) == []


def test_of_a_wait_that_nobody_knows_the_place_of_nothing_is_concluded():
    play = Play(2, warn_after_s=1000.0)
    play.busy(0, "something", 0.0)
    play.call(1, "a", begun=4)
    for _ in range(100):
        assert play.after(1.0) == []


def test_the_first_end_is_told_to_all_others():
    play = Play(3)
    play.negotiation.end(1, True, 0.0)
    play.negotiation.end(2, False, 0.0)
    assert [each for each in play.outbox() if each[1][0] == "left"] == [
        (2, ["left", 1, True]),
        # The last rank: its program may end in this way.
        (0, ["left", 1, True]),
    ]


def test_a_rank_that_is_not_blocked_may_still_come_and_nobody_is_refused():
    play = Play(2)
    play.call(0, "a")
    play.ask(1, "b")
    for _ in range(20):
        assert play.after(1.0) == []
    play.call(1, "a")
    assert kinds(play.said()) == [(0, "go"), (1, "go")]


def test_a_rank_that_waits_for_several_operations_is_told_of_each():
    play = Play(2)
    for rank in range(2):
        for number in range(3):
            play.call(rank, f"{rank}.{number}")
    play.after(0.0)
    said = play.after(SETTLING_S)
    assert sorted((rank, play.what_of[rank, message[1]]) for rank, message in said) == [
        (rank, f"{rank}.{number}") for rank in range(2) for number in range(3)
    ]
    assert play.is_idle


def test_waiting_in_a_chain_is_no_circle():
    # Rank 0 waits for 1, and 1 for 2; 2 computes.
    play = Play(3)
    play.call(0, "a", members=(0, 1), set_id=1)
    play.call(1, "b", members=(1, 2), set_id=2)
    for _ in range(5):
        assert play.after(1.0) == []
    play.call(2, "b", members=(1, 2), set_id=2)
    assert kinds(play.said()) == [(1, "go"), (2, "go")]


def test_a_circle_over_three_process_sets_is_one_error_for_all_three_ranks():
    play = Play(3)
    for rank in range(3):
        play.call(rank, f"between {rank} and {(rank + 1) % 3}", members=(rank, (rank + 1) % 3), set_id=rank + 1)
    play.after(0.0)
    one_error(play.after(SETTLING_S), [0, 1, 2])


def test_ranks_that_come_into_circles_later_are_told_only_once_messages_on_their_way_could_arrive():
    play = Play(4)
    for rank, name in enumerate("abcd"):
        if rank == 2:
            play.after(0.0)
            play.now_s = 0.75 * SETTLING_S
        pair = rank // 2
        play.call(rank, name, members=(2 * pair, 2 * pair + 1), set_id=1 + pair)
    play.after(0.0)
    assert play.after(0.5 * SETTLING_S) == []
    one_error(play.after(0.5 * SETTLING_S), [0, 1, 2, 3])


@pytest.mark.parametrize(("ended_normally", "error"), [(True, "CommunicationError"), (False, "PeerLostError")])
def test_a_rank_that_ends_is_named_to_those_that_wait_for_it_and_to_those_that_come_later(ended_normally, error):
    play = Play(3)
    play.call(0, "a")
    play.negotiation.end(2, ended_normally, 0.0)
    told, text = one_error(play.said(), [0])
    assert told == error
    assert text.startswith("Horovod has been shut down.")
    assert "rank 2 (node2)" in text
    play.call(1, "a")
    play.call(0, "b")
    assert sorted(refusals(play.said())) == [0, 1]


def test_a_later_end_is_told_to_ranks_that_connect_to_the_one_that_has_ended():
    play = Play(4)
    play.negotiation.end(0, ended_normally=True, now_s=0.0)
    for rank in (1, 2):
        play.ask(rank, None, "add_process_set", members=(1, 2, 3), set_id=1)
    play.ask(3, None, "add_process_set", members=(1, 2, 3), set_id=1)
    play.negotiation.outbox.clear()
    play.negotiation.end(3, ended_normally=False, now_s=0.0)
    assert play.outbox() == [(2, ["left", 3, False]), (1, ["left", 3, False])]


def test_the_first_failure_in_an_operation_is_told_to_the_other_ranks():
    play = Play()
    play.negotiation.failed(1, "all", 2, "no memory")
    play.negotiation.failed(2, "all", 2, "because of rank 1")
    play.negotiation.failed(2, "all", 1, "of the operation before")
    assert play.outbox() == [(rank, ["failed", 1, "all", 2, "no memory"]) for rank in (0, 2)]


def test_the_end_of_rank_0_is_told_too():
    play = Play(2)
    play.call(1, "a")
    play.negotiation.end(0, True, 0.0)
    assert "rank 0 (node1) has ended" in one_error(play.said(), [1])[1]


def test_a_rank_that_ends_holds_up_no_process_set_that_it_is_not_in():
    play = Play(3)
    play.negotiation.end(2, True, 0.0)
    for rank in (0, 1):
        play.call(rank, "a", members=(0, 1), set_id=1)
    assert kinds(play.said()) == [(0, "go"), (1, "go")]


# -- join


def test_who_has_joined_takes_part_in_all_reduces_and_is_told_what_they_are():
    play = Play(3)
    play.negotiation.join(2, False, 0.0)
    for rank in (0, 1):
        play.ask(rank, "a", dtype="float32", own=None)
    whole = ["stand_in", 0, [None] * 3, 3, "allreduce", "allreduce of 'a'", {"dtype": "float32"}]
    said = play.said()
    assert kinds(said) == [(0, "go"), (1, "go"), (2, "stand_in")]
    assert said[2][1] == whole


def test_averages_may_be_over_those_that_have_not_joined():
    play = Play(3)
    play.ask(0, "a")
    play.negotiation.join(1, True, 0.0)
    play.negotiation.join(2, True, 0.0)
    assert [message[3] for _, message in play.said()] == [1, 1, 1]


def test_the_last_to_join_is_told_to_all_and_they_may_join_again():
    play = Play(3)
    for _ in range(2):
        for rank in (2, 0, 1):
            play.negotiation.join(rank, False, 0.0)
        assert sorted(play.said()) == [(rank, ["joined", 1]) for rank in range(3)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("allgather", "Allgather is not supported with Join at this time."),
        ("broadcast", "Broadcast is not supported with Join at this time."),
        ("alltoall", "Alltoall is not supported with Join at this time."),
        ("reducescatter", "Reducescatter is not supported with Join at this time."),
        ("grouped_allgather", "Allgather is not supported with Join at this time."),
        ("hvd.DistributedOptimizer", "hvd.DistributedOptimizer is not supported with Join at this time."),
    ],
)
def test_other_operations_than_all_reduces_are_refused_while_somebody_has_joined(kind, words):
    play = Play(3)
    play.ask(0, "a", kind)
    play.negotiation.join(2, False, 0.0)
    play.ask(1, "a", kind)
    _, text = one_error(play.said(), [0, 1])
    assert text.startswith(words)
    assert play.is_idle


def test_ranks_that_join_to_different_averages_get_one_error():
    play = Play(2)
    play.negotiation.join(0, False, 0.0)
    play.negotiation.join(1, True, 0.0)
    assert one_error(play.said(), [0, 1])[1].startswith("Mismatched join")


def test_who_has_joined_learns_that_a_rank_it_waits_for_has_ended():
    play = Play(2)
    play.negotiation.join(0, False, 0.0)
    play.negotiation.end(1, False, 0.0)
    assert one_error(play.said(), [0])[0] == "PeerLostError"


def test_only_what_lives_on_all_members_is_sat_out_and_who_joins_later_is_told_the_same():
    play = Play(3)
    play.negotiation.join(
        0, False, 0.0, [LivingOptimizers(0, ALL[: play.size], (1, 2, 4)), LivingOptimizers(7, (0, 2), (1, 2))]
    )
    assert play.said() == [(1, ["pin", 0, 0]), (2, ["pin", 0, 0]), (2, ["pin", 0, 7])]
    play.negotiation.joined_steps.pinned(2, Pinned(0, 0, [1, 4]))
    play.negotiation.joined_steps.pinned(2, Pinned(0, 7, [2]))
    assert play.said() == [(0, ["sit_out", 7, [2]])]
    play.negotiation.joined_steps.pinned(1, Pinned(0, 0, [2, 4]))
    assert play.said() == [(0, ["sit_out", 0, [4]])]
    # The order counts: an optimizer of a set may be made until a member has joined, and not after.
    play.negotiation.join(
        1, False, 0.0, [LivingOptimizers(0, ALL[: play.size], (2, 4)), LivingOptimizers(8, (1, 2), (1,))]
    )
    assert play.said() == [(1, ["sit_out", 0, [4]]), (2, ["pin", 0, 8])]
    play.negotiation.join(
        2,
        False,
        0.0,
        [
            LivingOptimizers(0, ALL[: play.size], (4,)),
            LivingOptimizers(7, (0, 2), ()),
            LivingOptimizers(8, (1, 2), (1, 3)),
        ],
    )
    assert play.said() == [
        (2, ["sit_out", 0, [4]]),
        (2, ["sit_out", 7, [2]]),
        (1, ["sit_out", 8, [1]]),
        (2, ["sit_out", 8, [1]]),
        *((rank, ["joined", 2]) for rank in range(3)),
    ]


def test_a_rank_that_joins_before_it_is_asked_has_answered():
    play = Play(2)
    play.negotiation.join(1, False, 0.0, [LivingOptimizers(0, ALL[: play.size], (1, 2))])
    play.negotiation.join(0, False, 0.0, [LivingOptimizers(0, ALL[: play.size], (2,))])
    play.negotiation.joined_steps.pinned(0, Pinned(0, 0, []))
    assert play.said() == [
        (0, ["pin", 0, 0]),
        (1, ["sit_out", 0, [2]]),
        (0, ["sit_out", 0, [2]]),
        (1, ["joined", 0]),
        (0, ["joined", 0]),
    ]


def test_an_answer_of_a_join_that_failed_is_not_taken_for_that_of_the_next():
    play = Play(3)
    play.negotiation.join(0, False, 0.0, [LivingOptimizers(0, ALL[: play.size], (1,))])
    play.negotiation.join(1, True, 0.0, [LivingOptimizers(0, ALL[: play.size], (1,))])
    said = play.said()
    assert [entry for entry in said if entry[1][0] != "not_joined"] == [
        (1, ["pin", 0, 0]),
        (2, ["pin", 0, 0]),
        (2, ["unpin"]),
    ]
    play.negotiation.join(0, False, 0.0, [LivingOptimizers(0, ALL[: play.size], (1,))])
    play.negotiation.joined_steps.pinned(2, Pinned(0, 0, [1]))
    play.negotiation.joined_steps.pinned(1, Pinned(1, 0, [1]))
    assert play.said() == [(1, ["pin", 1, 0]), (2, ["pin", 1, 0])]
    play.negotiation.joined_steps.pinned(2, Pinned(1, 0, []))
    assert play.said() == [(0, ["sit_out", 0, []])]


@pytest.mark.parametrize("ended_normally", [True, False])
def test_a_rank_that_ends_instead_of_saying_what_lives_there_leaves_nobody_waiting(ended_normally):
    play = Play(3)
    play.negotiation.join(0, False, 0.0, [LivingOptimizers(0, ALL[: play.size], (1,))])
    play.said()
    play.negotiation.end(2, ended_normally, 0.0)
    assert kinds(play.said()) == [(0, "not_joined"), (1, "unpin")]


# -- stalls


def test_a_stall_is_told_once_per_period_with_who_is_missing_and_where_they_are():
    play = Play(4, warn_after_s=60.0)
    play.call(0, "a")
    play.ask(1, "b")
    play.busy(2, "the all-reduce of the gradients of fc.weight", 0.0)
    play.after(59.0)
    assert play.negotiation.warnings == []
    play.after(2.0)
    told = [words for words in play.negotiation.warnings if words.startswith("stalled: allreduce of 'a' in the global")]
    assert len(told) == 1
    for part in (
        "rank 0 (node1) called it",
        "rank 1 (node1), which has called allreduce of 'b'",
        "rank 2 (node2), which waits in the all-reduce of the gradients of fc.weight",
        "rank 3 (node2), which computes or hangs",
    ):
        assert part in told[0]
    play.negotiation.warnings.clear()
    play.after(30.0)
    assert play.negotiation.warnings == []
    play.after(31.0)
    assert any("allreduce of 'a'" in words for words in play.negotiation.warnings)


def test_ranks_say_where_they_are_shortly_before_they_are_told_of_and_not_sooner():
    play = Play(3, warn_after_s=60.0)
    play.negotiation.scene.pids[1] = 4242
    play.call(0, "a")
    for _ in range(53):
        play.negotiation.tick(play.now_s)
        play.now_s += 1.0
    assert play.asked_where() == []
    for _ in range(8):
        play.negotiation.tick(play.now_s)
        for rank in play.asked_where():
            if rank != 2:
                play.negotiation.stall.heard(rank, play.now_s)
                play.negotiation.stall.program_line(rank, f"train.py:4{rank} in load_batch (time.sleep)")
        play.now_s += 1.0
    (words,) = of_stalls(play)
    assert "rank 1 (node1, pid 4242), which is at train.py:41 in load_batch (time.sleep)" in words
    # A rank that does not answer is reported as silent, even if it waits for nothing that it should have reported.
    assert "rank 2 (node2), which computes or hangs and has sent nothing for 6 s: its process is stopped" in words


def test_who_was_stopped_after_it_had_said_where_it_is_is_told_of_with_both():
    play = Play(2, warn_after_s=60.0)
    play.call(0, "a")
    for seconds in range(122):
        play.now_s = float(seconds)
        play.negotiation.tick(play.now_s)
        for rank in play.asked_where():
            if seconds < 60:
                play.negotiation.stall.program_line(rank, "train.py:7 in save")
    warnings = of_stalls(play)
    assert "rank 1 (node1), which is at train.py:7 in save" in warnings[0]
    assert "rank 1 (node1), which is at train.py:7 in save and has sent nothing for" in warnings[1]


def test_the_end_of_a_wait_says_where_the_others_are():
    play = Play(2, warn_after_s=5.0, end_after_s=10.0)
    for rank in (0, 1):
        play.negotiation.scene.pids[rank] = 70 + rank
    play.busy(0, "bucket 0 of optimizer 1", 0.0)
    said = []
    for _ in range(11):
        play.now_s += 1.0
        play.negotiation.tick(play.now_s)
        for rank in play.asked_where():
            play.negotiation.stall.program_line(rank, "train.py:7 in save")
        said += play.said()
    assert "rank 1 (node1, pid 71), which is at train.py:7 in save" in next(m[1] for _, m in said if m[0] == "end")


def test_of_a_join_too_it_is_told_where_the_others_are():
    play = Play(2, warn_after_s=5.0)
    play.negotiation.join(0, False, 0.0)
    for _ in range(6):
        play.now_s += 1.0
        play.negotiation.tick(play.now_s)
        for rank in play.asked_where():
            play.negotiation.stall.program_line(rank, "train.py:7 in save")
    (words,) = of_stalls(play)
    assert "Not joined: rank 1 (node1), which is at train.py:7 in save" in words


def test_a_stall_ends_as_an_error_if_that_is_asked_for():
    play = Play(2, warn_after_s=5.0, end_after_s=10.0)
    play.call(0, "a")
    assert play.after(9.0) == []
    error, text = one_error(play.after(1.0), [0])
    assert error == "CommunicationError"
    assert "allreduce of 'a'" in text
    assert "missing: rank 1 (node1)" in text


def test_without_a_stall_check_an_operation_ends_after_its_timeout():
    play = Play(2, timeout_s=10.0)
    play.call(0, "a")
    play.busy(1, "a bucket", 0.0)
    assert play.after(9.0) == []
    assert one_error(play.after(1.0), [0])[0] == "CommunicationError"
    assert play.negotiation.warnings == []


def test_a_wait_for_gradients_is_told_too_and_ended_with_the_process():
    play = Play(3, warn_after_s=5.0, end_after_s=10.0)
    for rank in (0, 2):
        play.busy(rank, "the all-reduce of the gradients of fc.weight", 0.0)
    assert play.after(6.0) == []
    (words,) = play.negotiation.warnings
    assert "ranks 0 (node1), 2 (node2) have waited 6 s in the all-reduce of the gradients of fc.weight" in words
    assert "rank 1 (node1), which computes or hangs" in words
    said = play.after(4.0)
    assert kinds(said) == [(0, "end"), (2, "end")]


def test_a_wait_for_gradients_that_is_over_is_not_told():
    play = Play(2, warn_after_s=5.0)
    play.busy(0, "a bucket", 0.0)
    play.busy(0, None, 0.0)
    play.after(100.0)
    assert play.negotiation.warnings == []
    assert play.is_idle


@given(st.data(), st.integers(2, 4))
def test_whatever_the_order_of_asking_everything_begins_once_on_every_rank_and_in_one_order(data, size):
    names = [str(number) for number in range(data.draw(st.integers(1, 8)))]
    orders = [data.draw(st.permutations(names)) for _ in range(size)]
    turns = data.draw(st.permutations([rank for rank in range(size) for _ in names]))
    play = Play(size)
    asked = [iter(order) for order in orders]
    for rank in turns:
        play.ask(rank, next(asked[rank]))
    begun = play.begun()
    assert all(order == begun[0] for order in begun)
    assert sorted(begun[0]) == sorted(names)
    assert play.is_idle


def test_every_pair_of_different_calls_ends_in_an_error_on_both_ranks():
    calls = [{"name": "a"}, *DIFFERENT_CALLS.values(), {"name": "a", "dtype": "x"}, {"name": "a", "shape": [1]}]
    for one, another in itertools.combinations(calls, 2):
        play = Play(2)
        play.call(0, **one)
        play.call(1, **another)
        told = play.said() + play.after(0.0) + play.after(SETTLING_S) + play.after(SETTLING_S)
        one_error(told, [0, 1])


def of_stalls(play: Play) -> list[str]:
    warnings, play.negotiation.warnings[:] = list(play.negotiation.warnings), []
    return warnings


def test_a_stalled_operation_that_misses_other_ranks_than_the_first_says_which():
    play = Play(2, warn_after_s=60.0)
    play.ask(0, "a")
    play.ask(1, "b")
    play.after(61.0)
    assert "allreduce of 'b' (missing: rank 0 (node1))" in of_stalls(play)[0]


def test_many_stalled_operations_are_one_warning_with_the_first_eight_and_their_number():
    play = Play(2, warn_after_s=60.0)
    for number in range(20):
        play.ask(0, str(number))
    play.ask(1, "other")
    play.after(61.0)
    (words,) = of_stalls(play)
    assert "stalled: allreduce of '0' in the global process set has been waiting 61 s" in words
    assert "20 more operations have been waiting too long: allreduce of '1', " in words
    assert "allreduce of '7' and 13 more" in words
    assert "allreduce of '8'" not in words
    assert "set HVDLITE_STALL_SHUTDOWN_S" in words
    play.after(30.0)
    assert of_stalls(play) == []
    play.after(31.0)
    assert len(of_stalls(play)) == 1


def test_what_is_told_of_a_stall_names_processes_and_the_way_out():
    play = Play(2, warn_after_s=60.0, end_after_s=300.0)
    play.negotiation.scene.pids[1] = 4242
    play.ask(0, "a")
    play.after(61.0)
    (words,) = of_stalls(play)
    assert "missing: rank 1 (node1, pid 4242), which computes or hangs" in words
    assert words.endswith("After 300 s (HVDLITE_STALL_SHUTDOWN_S) the job is ended")


def test_a_rank_that_hangs_in_what_all_have_begun_is_told_of_though_nothing_is_pending():
    play = Play(3, warn_after_s=5.0, end_after_s=10.0)
    for rank in range(3):
        play.negotiation.stall.heard(rank, 0.0)
        play.call(rank, "a")
    play.said()
    assert play.is_idle
    for rank in (0, 2):
        play.busy(rank, "allreduce of 'a'", 0.0, is_operation=True)
    for _ in range(6):
        assert play.after(1.0) == []
        for rank in (0, 2):
            play.negotiation.stall.heard(rank, play.now_s)
    (words,) = of_stalls(play)
    assert "ranks 0 (node1), 2 (node2) have waited 5 s in allreduce of 'a', for ranks that have not begun it" in words
    assert "rank 1 (node1), which is in allreduce of 'a' and has sent nothing for 5 s" in words
    assert kinds(play.after(4.0)) == [(0, "end"), (2, "end")]


def test_a_rank_that_was_blocked_and_then_fell_silent_is_told_of_as_silent():
    play = Play(2, warn_after_s=20.0)
    for rank in range(2):
        play.busy(rank, "the bucket", 0.0)
        play.negotiation.stall.heard(rank, 0.0)
    for _ in range(21):
        play.after(1.0)
        play.negotiation.stall.heard(0, play.now_s)
    (words,) = of_stalls(play)
    assert "rank 0 (node1) has waited 20 s in the bucket" in words
    assert "rank 1 (node1), which waits in the bucket and has sent nothing for 20 s" in words


def test_an_operation_is_known_until_it_is_over_on_a_rank():
    play = Play(2, warn_after_s=5.0)
    for name in "ab":
        for rank in range(2):
            play.call(rank, name)
    play.negotiation.scene.over(1, 1)
    play.busy(0, "allreduce of 'b'", 0.0, is_operation=True)
    play.after(6.0)
    assert "rank 1 (node1), which is in allreduce of 'b'" in of_stalls(play)[0]


def test_where_all_are_in_what_takes_too_long_no_rank_is_blamed():
    play = Play(2, warn_after_s=5.0)
    for rank in range(2):
        play.busy(rank, "the bucket", 0.0)
        play.negotiation.stall.heard(rank, 6.0)
    play.after(6.0)
    (words,) = of_stalls(play)
    assert (
        "ranks 0 (node1), 1 (node1) have waited 6 s in the bucket, and all ranks that take part have begun it" in words
    )


def test_ranks_that_wait_in_different_buckets_are_told_with_both():
    play = Play(2, warn_after_s=5.0)
    play.busy(0, "bucket 0 of optimizer 1", 0.0)
    play.busy(1, "bucket 0 of optimizer 2", 0.5)
    play.after(5.6)
    (words,) = of_stalls(play)
    assert "rank 0 (node1) has waited 6 s in bucket 0 of optimizer 1" in words
    assert "rank 1 (node1), which waits in bucket 0 of optimizer 2" in words


def test_a_rank_that_has_joined_is_said_to_wait_in_join():
    play = Play(3, warn_after_s=5.0)
    play.negotiation.join(1, False, 0.0)
    play.busy(0, "bucket 0 of optimizer 1", 0.0)
    play.after(6.0)
    (words,) = of_stalls(play)
    assert "rank 1 (node1), which waits in hvd.join()" in words


def test_a_join_that_others_never_come_to_is_told_of_and_ended_once_nobody_does_anything():
    play = Play(2, warn_after_s=5.0, end_after_s=20.0)
    play.negotiation.join(0, False, 0.0)
    play.after(4.0)
    play.ask(1, "a")
    play.said()
    play.after(4.0)
    assert of_stalls(play) == []
    play.after(2.0)
    (words,) = of_stalls(play)
    assert "rank 0 (node1) called hvd.join(), and for 6 s no rank has called any operation" in words
    assert "Not joined: rank 1 (node1), which" in words
    assert one_error(play.after(15.0), [0])[0] == "CommunicationError"


def play_of_join_with_an_optimizer(**stall: float) -> Play:
    """Rank 1 has joined, and takes part in the steps of the one optimizer without gradients."""
    play = Play(2, **stall)
    play.negotiation.join(1, False, 0.0, [LivingOptimizers(0, ALL[: play.size], (1,))])
    play.negotiation.joined_steps.pinned(0, Pinned(0, 0, [1]))
    assert (1, ["sit_out", 0, [1]]) in play.said()
    return play


def test_a_join_is_no_stall_while_the_others_take_steps_which_nobody_is_told_of():
    play = play_of_join_with_an_optimizer(warn_after_s=5.0, end_after_s=10.0)
    for _ in range(30):
        # Its wait for each bucket is too short to be reported.
        assert play.after(1.0) == []
    assert of_stalls(play) == []


def test_a_join_is_no_stall_while_the_others_ask_for_operations_and_take_no_step():
    play = play_of_join_with_an_optimizer(warn_after_s=5.0, end_after_s=10.0)
    play.busy(1, "bucket 0 of optimizer 1", 0.0)
    for _ in range(30):
        play.ask(0, "metric")
        play.after(1.0)
    assert of_stalls(play) == []
    # Nor right after it, before the rank has reported that it no longer waits there.
    play.negotiation.join(0, False, play.now_s, [LivingOptimizers(0, ALL[: play.size], (1,))])
    play.after(1.0)
    assert of_stalls(play) == []
    assert [message for _, message in play.said() if message[0] == "end"] == []


def test_a_joined_rank_that_is_not_heard_of_any_more_is_what_the_others_wait_for():
    play = play_of_join_with_an_optimizer(warn_after_s=5.0)
    play.busy(1, "bucket 0 of optimizer 1", 0.0)
    play.negotiation.stall.heard(1, 0.0)
    play.ask(0, "metric")
    play.said()
    play.busy(0, "allreduce of 'metric'", 0.0, is_operation=True)
    for _ in range(6):
        play.negotiation.stall.heard(0, play.now_s)
        play.after(1.0)
    (words,) = of_stalls(play)
    assert "rank 0 (node1) has waited" in words
    assert "rank 1 (node1), which waits in hvd.join()" in words
    assert "has sent nothing for" in words


def test_a_rank_one_thread_of_which_can_still_ask_is_in_no_circle():
    play = Play(2, warn_after_s=60.0)
    play.busy(0, "the bucket", 0.0, is_stuck=False, bucket=1)
    play.call(1, "a")
    for _ in range(20):
        assert play.after(1.0) == []
    play.busy(0, "the bucket", 0.0, bucket=1)
    play.after(0.0)
    one_error(play.after(SETTLING_S), [1])


class Counted(dict):
    """A dict that counts how often it is iterated over."""

    looks = 0

    def values(self):
        self.looks += 1
        return super().values()


@pytest.mark.parametrize("name", [None, "named"])
def test_what_is_pending_is_not_looked_through_with_every_message(name):
    play = Play(2, warn_after_s=60.0)
    play.negotiation.scene.pending = counted = Counted()
    for rank in range(2):
        for number in range(200):
            play.ask(rank, name and f"{name}{number}")
    assert counted.looks == 0
    assert kinds(play.said()) == [(rank, "go") for _ in range(200) for rank in range(2)]


def test_unnamed_operations_cost_a_rank_the_same_however_many_are_pending(monkeypatch):
    looks = []
    waits_for = Pending.waits_for
    monkeypatch.setattr(Pending, "waits_for", lambda self, rank: looks.append(rank) or waits_for(self, rank))
    play = Play(2)
    for rank in range(2):
        for _ in range(500):
            play.ask(rank, None)
    assert len(looks) <= 2 * 500


def test_many_that_are_refused_are_told_without_looking_at_each_other():
    play = Play(2)
    for number in range(300):
        play.ask(0, str(number))
    play.negotiation.scene.pending = counted = Counted(play.negotiation.scene.pending)
    play.negotiation.end(1, False, 0.0)
    assert len(refusals(play.said())) == 1
    assert counted.looks <= 2
    assert play.is_idle
