"""The text of the tables that --check prints."""

import pytest
from hvdlite_launcher.check.diagnosis import Cell
from hvdlite_launcher.check.run_check import ASCII, UNICODE, RoundTrips, show

WELL = {"Python": Cell("3.11.2"), "GPUs": Cell(), "hvdlite": Cell("0.1.0")}
AMISS = {**WELL, "Python": Cell("3.10.1", "Python is 3.10 here: use the same"), "GPUs": Cell("", "none")}
ROWS = {"a": WELL, "node-2": AMISS, "c": "Permission denied (publickey). (ssh-copy-id c)"}
TRIPS = RoundTrips(
    ["a", "node-2", "d"], {("a", "node-2"): 123.4, ("a", "d"): 20480.0}, {("node-2", "d"): "Connect timeout"}
)

GOLDEN = """\
host      Python    GPUs    hvdlite
a       ✓ 3.11.2  –       ✓ 0.1.0
node-2  ✗ 3.10.1  ✗       ✓ 0.1.0
c       ✗ Permission denied

round trips between hosts, over gloo

        a        node-2  d
a       –        123 µs  20.5 ms
node-2  123 µs   –       ✗
d       20.5 ms  ✗       –

what to do

  ✗ node-2: Python is 3.10 here: use the same
  ✗ node-2: none
  ✗ c: Permission denied (publickey). (ssh-copy-id c)
  ✗ node-2 and d: Connect timeout (allow TCP between them, or choose another network with --network-interface)
"""


def test_hosts_ways_and_what_to_do():
    assert show(ROWS, TRIPS, UNICODE) == (GOLDEN, False)


def test_the_same_in_ascii():
    text, _ = show(ROWS, TRIPS, ASCII)
    lines = text.splitlines()
    assert lines[:3] == [
        "host       Python     GPUs     hvdlite",
        "a       ok 3.11.2  -        ok 0.1.0",
        "node-2  !! 3.10.1  !!       ok 0.1.0",
    ]
    assert "a       -        123 us  20.5 ms" in lines
    assert text.isascii()


def test_where_all_is_well_nothing_is_to_be_done():
    text, is_well = show({"a": WELL, "b": WELL}, RoundTrips(["a", "b"], {("a", "b"): 99.0}, {}), UNICODE)
    assert is_well
    assert "what to do" not in text


@pytest.mark.parametrize("broken", [{"rows": {"a": AMISS}}, {"rows": {"a": "gone"}}, {"trips": TRIPS}])
def test_any_fault_is_enough_for_all_not_to_be_well(broken):
    assert not show(broken.get("rows", {"a": WELL}), broken.get("trips"), UNICODE)[1]


def test_a_note_stands_below_the_table():
    assert show({"a": WELL}, None, UNICODE, ["not measured"])[0].endswith("0.1.0\n\nnot measured\n")


@pytest.mark.parametrize(("encoding", "fit"), [("utf-8", True), ("ascii", False), ("latin-1", False), ("?", False)])
def test_marks_are_known_to_fit_an_encoding_or_not(encoding, fit):
    assert UNICODE.fit(encoding) is fit
    assert ASCII.fit("ascii")


STEP = "a firewall? Allow TCP there, usually on ports 32768-60999, or choose a network with --network-interface"


def test_a_blocked_connection_is_named_by_its_direction_and_one_blocked_in_both_once():
    blocked = {("b", "a"): "connection timed out", ("a", "c"): "refused", ("c", "a"): "refused"}
    trips = RoundTrips(["a", "b", "c"], {("b", "c"): 99.0}, {}, blocked)
    text, is_well = show({"a": WELL, "b": WELL, "c": WELL}, trips, UNICODE)
    assert not is_well
    assert text.partition("what to do\n\n")[2].splitlines() == [
        f"  ✗ b cannot connect to a: connection timed out ({STEP})",
        f"  ✗ a and c cannot connect to each other: refused ({STEP})",
    ]
    assert [line.split() for line in text.splitlines() if line.startswith(("a  ✗", "a  –"))][-1] == ["a", "–", "✗", "✗"]
