"""Which hosts are given up, since others cannot reach them or are refused by them."""

from __future__ import annotations

import itertools

import pytest
from hvdlite_launcher.elastic.hangs import MOST_FAILED_MEETINGS, CutLinks, RefusedLinks, fewest_to_give_up
from hvdlite_launcher.protocol.messages import Alive, InitFailed


def between(*pairs: str) -> list[frozenset[str]]:
    return [frozenset(pair) for pair in pairs]


@pytest.mark.parametrize(
    ("workers", "cuts", "given_up"),
    [
        ({"a": 2, "b": 2}, [], []),
        ({"a": 2, "b": 2}, ["ab"], ["b"]),
        ({"a": 1, "b": 2}, ["ab"], ["a"]),
        ({"a": 1, "b": 1, "c": 1}, ["bc"], ["b"]),
        ({"a": 1, "b": 1, "c": 1}, ["ac", "bc"], ["c"]),
        ({"a": 1, "b": 1, "c": 1}, ["ab", "ac"], ["a"]),
        ({"a": 1, "b": 1, "c": 1}, ["ab"], ["b"]),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, ["ac", "ad", "bc", "bd"], ["c", "d"]),
        ({"a": 1, "b": 1, "c": 3, "d": 1}, ["ac", "ad", "bc", "bd"], ["a", "b"]),
    ],
)
def test_the_side_with_fewer_workers_is_given_up_and_at_a_tie_that_without_rank_0(workers, cuts, given_up):
    assert sorted(fewest_to_give_up(workers, between(*cuts))) == given_up


def test_whatever_is_cut_no_cut_link_is_left_between_the_others_and_some_are_left():
    hosts = "abcd"
    links = ["".join(pair) for pair in itertools.combinations(hosts, 2)]
    for count in range(len(links) + 1):
        for cuts in itertools.combinations(links, count):
            gone = fewest_to_give_up(dict.fromkeys(hosts, 1), between(*cuts))
            left = set(hosts) - set(gone)
            assert left
            assert not any(set(cut) <= left for cut in cuts)
            # No host is given up in vain.
            assert all(any(host in cut for cut in cuts) for host in gone)


HOST_OF = {0: "a", 1: "a", 2: "b"}


def said(*answers: tuple[int, str, dict[str, float]], hang_timeout_s: float = 30) -> CutLinks:
    links = CutLinks(hang_timeout_s)
    for worker, address, silent_s in answers:
        links.answered(Alive(worker, 0, 0.0, (address,), silent_s))
    return links


def test_one_end_suffices_if_the_other_has_said_where_it_is():
    links = said((0, "::1", {"::2": 15.0}), (2, "::2", {}))
    assert [host for host, _ in links.cut_off(HOST_OF)] == ["b"]


def test_nobody_is_given_up_before_the_other_end_has_answered():
    links = said((0, "::1", {"::2": 15.0}), (1, "::1", {"::2": 15.0}))
    assert links.cut_off(HOST_OF) == []
    links.answered(Alive(2, 0, 0.0, ("::2",), {}))
    links.forget(2)
    assert links.cut_off(HOST_OF) == []


def test_once_one_connection_is_silent_for_the_limit_those_count_that_are_silent_for_half_of_it():
    host_of = {0: "a", 1: "b", 2: "c"}
    links = said((0, "::1", {"::3": 15.0}), (1, "::2", {"::3": 8.0}), (2, "::3", {}))
    assert [host for host, _ in links.cut_off(host_of)] == ["c"]
    # Without b's answer, a and c would be equal.
    assert fewest_to_give_up({"c": 1, "a": 1}, between("ac")) == ["a"]


def test_silence_between_ranks_of_one_host_is_no_cut_network():
    assert said((0, "::1", {"::1": 99.0}), (1, "::1", {}), (2, "::2", {})).cut_off(HOST_OF) == []


def test_the_answers_of_an_ended_generation_do_not_count():
    links = said((0, "::1", {"::2": 15.0}), (2, "::2", {}))
    links.forget_all()
    assert links.cut_off(HOST_OF) == []


def test_the_limit_is_at_least_three_probes():
    almost = said((0, "::1", {"::2": 5.9}), (2, "::2", {}), hang_timeout_s=1)
    assert almost.cut_off(HOST_OF) == []
    assert said((0, "::1", {"::2": 6.0}), (2, "::2", {}), hang_timeout_s=1).cut_off(HOST_OF)


def test_at_most_three_of_the_unreachable_hosts_are_named():
    hosts = {number: f"n{number}" for number in range(6)}
    answers = [(number, f"::{number}", {"::5": 20.0}) for number in range(5)]
    ((host, why),) = said(*answers, (5, "::5", {})).cut_off(hosts)
    assert host == "n5"
    assert "between it and n0, n1, n2 and 2 more is cut: nothing came over it for 20 s" in why


RANKS_ON = {0: "a", 1: "a", 2: "b", 3: "c"}
AT = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "d": "10.0.0.4"}


def fails(worker: int, refused_by: str = "", host_of=RANKS_ON) -> InitFailed:
    return InitFailed(worker, 2, True, (AT[host_of[worker]],), tuple(AT[host] for host in refused_by))


def given_up(links: RefusedLinks, *events: InitFailed, host_of=RANKS_ON) -> list[str]:
    """Returns the hosts to give up by what fails in one generation."""
    found = [each.host for event in events for each in links.failed(event, host_of)]
    links.next_generation()
    return found


def test_a_host_that_refuses_in_two_generations_is_given_up_once_its_own_rank_has_given_up():
    links = RefusedLinks()
    assert given_up(links, fails(0, "c"), fails(3), fails(1)) == []
    assert links.failed(fails(0, "c"), RANKS_ON) == []
    (given,) = links.failed(fails(3), RANKS_ON)
    assert given.host == "c"
    assert given.why == (
        "TCP connections between it and a are refused, though hvdlite-run reaches both ends. Does a firewall block "
        "them? hvdlite-run --check shows which connections fail"
    )
    assert links.failed(fails(1), RANKS_ON) == [], "once"


def test_a_host_that_is_refused_by_the_others_is_given_up_too():
    links = RefusedLinks()
    assert given_up(links, fails(3, "a"), fails(0)) == []
    assert given_up(links, fails(0), fails(3, "a")) == [], "it may have been refused since the other had given up"
    assert given_up(links, fails(3, "a"), fails(0)) == ["c"]


def test_a_rank_that_refuses_and_has_ended_is_no_host_that_refuses():
    links = RefusedLinks()
    assert given_up(links, fails(0, "c"), fails(1)) == given_up(links, fails(0, "c"), fails(1)) == []


def test_a_refusal_from_before_all_were_connected_does_not_count():
    links = RefusedLinks()
    given_up(links, fails(0, "c"), fails(3))
    links.forget_all()
    assert given_up(links, fails(0, "c"), fails(3)) == []


def test_a_host_that_refuses_its_own_ranks_is_not_given_up():
    links = RefusedLinks()
    assert given_up(links, fails(0, "a"), fails(1)) == given_up(links, fails(0, "a"), fails(1)) == []


def test_three_hosts_that_refuse_in_any_order_are_given_up_before_the_job_is():
    host_of = {0: "a", 1: "b", 2: "c", 3: "d"}
    links, generations, order = RefusedLinks(), 0, "bcd"
    while len(host_of) > 1:
        generations += 1
        assert generations < MOST_FAILED_MEETINGS
        other = next(host for host in order[generations % 3 :] + order if host in host_of.values())
        refuses = next(worker for worker, host in host_of.items() if host == other)
        gone = given_up(links, fails(0, other, host_of), *(fails(each, "", host_of) for each in host_of if each),
                        host_of=host_of)  # fmt: skip
        assert gone in ([], [other])
        if gone:
            del host_of[refuses]
            generations = 0  # the ranks are others now
