"""The text of the tables that --check prints."""

import pytest
from hvdlite_launcher.check.diagnosis import Cell, RoundTrips, show

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
    assert show(ROWS, TRIPS) == (GOLDEN, False)


def test_where_all_is_well_nothing_is_to_be_done():
    text, is_well = show({"a": WELL, "b": WELL}, RoundTrips(["a", "b"], {("a", "b"): 99.0}, {}))
    assert is_well
    assert "what to do" not in text


@pytest.mark.parametrize("broken", [{"rows": {"a": AMISS}}, {"rows": {"a": "gone"}}, {"trips": TRIPS}])
def test_any_fault_is_enough_for_all_not_to_be_well(broken):
    assert not show(broken.get("rows", {"a": WELL}), broken.get("trips"))[1]


def test_that_nothing_was_measured_stands_below_the_table_of_several_hosts():
    assert show({"a": WELL}, None)[0].endswith("0.1.0\n")
    assert "\n\nround trips between hosts: not measured" in show({"a": WELL, "b": WELL}, None)[0]


STEP = "a firewall? Allow TCP there, usually on ports 32768-60999, or choose a network with --network-interface"


def test_a_blocked_connection_is_named_by_its_direction():
    blocked = {("b", "a"): "connection timed out", ("a", "c"): "refused", ("c", "a"): "refused"}
    trips = RoundTrips(["a", "b", "c"], {("b", "c"): 99.0}, {}, blocked)
    text, is_well = show({"a": WELL, "b": WELL, "c": WELL}, trips)
    assert not is_well
    assert text.partition("what to do\n\n")[2].splitlines() == [
        f"  ✗ b cannot connect to a: connection timed out ({STEP})",
        f"  ✗ a cannot connect to c: refused ({STEP})",
        f"  ✗ c cannot connect to a: refused ({STEP})",
    ]
    assert [line.split() for line in text.splitlines() if line.startswith(("a  ✗", "a  –"))][-1] == ["a", "–", "✗", "✗"]
