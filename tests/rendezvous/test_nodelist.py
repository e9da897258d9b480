"""Slurm's lists of hosts are read as Slurm writes them; whatever else comes is one error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.rendezvous.nodelist import expand_nodelist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("vm", ["vm"]),
        ("a,b", ["a", "b"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("n[08-10]-ib,login", ["n08-ib", "n09-ib", "n10-ib", "login"]),
        ("r[1-2]n[0,2]", ["r1n0", "r1n2", "r2n0", "r2n2"]),
        ("a-1.example.org,b[5]", ["a-1.example.org", "b5"]),
    ],
)
def test_a_list_of_hosts_is_expanded_in_order(text, hosts):
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["", ",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[1-]", "n[2-1]", "n[a]", "n[[1]]",
                                  "n[1-99999999999]", "n[1-2000]x[1-2000]", "n[" + "9" * 5000 + "]"])  # fmt: skip
def test_what_is_no_list_is_named(text):
    with pytest.raises(hvd.LaunchEnvironmentError, match=r"SLURM_STEP_NODELIST=.* is not a list of hosts such as"):
        expand_nodelist(text)


ranges = st.tuples(st.integers(0, 200), st.integers(0, 20), st.integers(1, 4))
names = st.text("abcxyz-.", min_size=1, max_size=5)


@given(st.lists(st.tuples(names, st.lists(ranges, max_size=3)), min_size=1, max_size=4))
def test_what_is_written_in_ranges_comes_out_as_the_hosts_it_stands_for(items):
    written, hosts = [], []
    for name, spans in items:
        if not spans:
            written.append(name)
            hosts.append(name)
            continue
        texts = [f"{first:0{width}}-{first + more:0{width}}" for first, more, width in spans]
        written.append(f"{name}[{','.join(texts)}]")
        hosts += [f"{name}{n:0{max(width, len(str(first)))}}" for first, more, width in spans
                  for n in range(first, first + more + 1)]  # fmt: skip
    assert expand_nodelist(",".join(written)) == hosts


@given(st.text("n019[],- ", max_size=30) | st.text(max_size=30))
def test_any_text_is_a_list_of_hosts_or_one_error(text):
    try:
        assert all(expand_nodelist(text))
    except hvd.LaunchEnvironmentError:
        return
