"""Hosts that refuse connections are given up, and none that refuses only since a rank there has ended or given up."""

from __future__ import annotations

from hvdlite_launcher.elastic.hangs import MOST_FAILED_MEETINGS, RefusedLinks
from hvdlite_launcher.protocol.messages import InitFailed

HOST_OF = {0: "a", 1: "a", 2: "b", 3: "c"}
AT = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "d": "10.0.0.4"}


def fails(worker: int, refused_by: str = "", host_of=HOST_OF) -> InitFailed:
    return InitFailed(worker, 2, True, (AT[host_of[worker]],), tuple(AT[host] for host in refused_by))


def given_up(links: RefusedLinks, *events: InitFailed, host_of=HOST_OF) -> list[str]:
    """Returns the hosts to give up by what fails in one generation."""
    found = [each.host for event in events for each in links.failed(event, host_of)]
    links.next_generation()
    return found


def test_a_host_that_refuses_in_two_generations_is_given_up_once_its_own_rank_has_given_up():
    links = RefusedLinks()
    assert given_up(links, fails(0, "c"), fails(3), fails(1)) == []
    assert links.failed(fails(0, "c"), HOST_OF) == []
    (given,) = links.failed(fails(3), HOST_OF)
    assert given.host == "c"
    assert given.why == (
        "TCP connections between it and a are refused, though hvdlite-run reaches both ends. Does a firewall block "
        "them? hvdlite-run --check shows which connections fail"
    )
    assert links.failed(fails(1), HOST_OF) == [], "once"


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
