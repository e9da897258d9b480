"""What `links` makes of samples, of the kernel's counters and of its flags, and where it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hvdlite as hvd
from hvdlite.bench import links, namespaces
from hvdlite.bench.__main__ import parse
from hvdlite.bench.arguments import OptionError
from hvdlite.bench.links import TECHNIQUES, SlowLinks, most_sent, read_rates, read_sent
from hvdlite.bench.namespaces import bits_per_s
from hvdlite.bench.ranks import Ranks
from hvdlite.runtime.world import current_world

COUNTERS = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 900000      10    0    0    0     0          0         0  900000      10    0    0    0     0       0     0
  eth0: 4000 20 0 0 0 0 0 0 {eth0} 30 0 0 0 0 0 0
 bond0:5000 20 0 0 0 0 0 0 {bond0} 30 0 0 0 0 0 0
"""


def test_rates_are_those_of_tc_without_duplicates():
    assert read_rates("1gbit, 100MBIT,1gbit") == ("1gbit", "100mbit")
    assert read_rates("as-is") == ("as-is",)
    assert [bits_per_s(rate) for rate in ("1gbit", "1.5mbit", "64kbit")] == [1e9, 1.5e6, 64e3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rates 100", "--rates: '100' is not the rate of a link, such as 100mbit or 1gbit"),
        ("--rates 1gbit,0mbit", "--rates: '0mbit' is not the rate of a link, such as 100mbit or 1gbit"),
        ("--rates as-is,1gbit", "--rates: as-is stands alone: links cannot be limited and be left as they are"),
        ("--hosts 1", "--hosts: a host that is alone has no link: say at least 2"),
        ("--rates as-is --hosts 2", "--hosts: with --rates as-is the hosts are those of the job: leave it out"),
        (
            "--techniques int8,int2",
            "--techniques: 'int2' is not a technique: choose from ddp, ddp-fp16, ddp-powersgd, ",
        ),
        ("--steps 0", "--steps: '0' is not a whole number of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words, message):
    with pytest.raises(OptionError) as error:
        parse(["links", *words.split()], is_first=True)
    assert str(error.value).startswith(f"hvdlite.bench links: {message}")


def test_a_package_that_a_technique_needs_is_named_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(links.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"^--techniques: ddp-powersgd: PyTorch's hook needs numpy"):
        SlowLinks()
    assert SlowLinks(techniques=("ddp", "int8")).techniques == ("ddp", "int8")


def test_bytes_are_those_of_the_busiest_interface_but_loopback():
    before, after = (read_sent(COUNTERS.format(eth0=eth0, bond0=bond0)) for eth0, bond0 in ((100, 7), (350, 257)))
    assert before == {"eth0": 100, "bond0": 7}
    assert most_sent(before, after) == 250
    assert most_sent({}, {"eth0": 5}) == 5
    assert most_sent({}, {}) == 0


def measured(*names: str) -> SlowLinks:
    """Returns the command with samples of these techniques at two rates, the second ten times as slow."""
    command = SlowLinks(techniques=names)
    given = {"ddp": ([8.0, 10.0, 12.0], 100.0), "ddp-fp16": ([5.0], 50.0), "int8": ([2.0, 2.5, 4.0], 25.0)}
    given["diloco"] = ([0.1], 0.13)
    for factor, case in zip((1, 10), command.cases, strict=True):
        case.samples = {name: [factor * each for each in given[name][0]] for name in names}
        command.sent[case.label] = {name: [given[name][1]] * len(given[name][0]) for name in names}
    return command


def test_ratios_are_of_steps_in_the_same_time_at_the_same_rate():
    report = measured("ddp", "ddp-fp16", "int8", "diloco").report()
    assert [
        (row["rate"], row["technique"], row["times_faster_than_ddp"], row["times_faster_than_ddp_fp16"])
        for row in report.data["rows"]
    ] == [
        (rate, *row)
        for rate in ("1gbit", "100mbit")
        for row in (("ddp", 1.0, 0.5), ("ddp-fp16", 2.0, 1.0), ("int8", 4.0, 2.0), ("diloco", 100.0, 50.0))
    ]
    rows = {(row["rate"], row["technique"]): row for row in report.data["rows"]}
    assert rows["100mbit", "int8"]["median_bytes"] == 25.0
    assert rows["1gbit", "diloco"]["interval"] == 100
    assert "Averages over whole intervals, in steps: diloco 100." in report.text
    assert report.code == 0


def test_the_chart_has_a_panel_for_each_rate_and_ratios_beside_the_bars():
    panels = measured("ddp", "int8").report().chart.panels
    assert [panel.title for panel in panels] == ["1gbit", "100mbit"]
    assert [panel.texts for panel in panels] == [
        ["10.0 s, 1.00 × ddp", "2.50 s, 4.00 × ddp"],
        ["100 s, 1.00 × ddp", "25.0 s, 4.00 × ddp"],
    ]
    for panel in panels:
        assert [row["variant"] for row in panel.rows] == ["ddp", "hvdlite int8"]


def test_without_ddp_ratios_are_left_out():
    report = measured("int8").report()
    assert [row["times_faster_than_ddp"] for row in report.data["rows"]] == [None, None]
    assert report.chart.panels[0].texts == ["2.50 s, – × ddp"]


def prepared(command: SlowLinks) -> str:
    """Returns why the command cannot run in this process."""
    hvd.init()
    ranks = Ranks(current_world(), "cpu")
    try:
        with pytest.raises(OptionError) as error:
            command.prepare(ranks)
        return str(error.value)
    finally:
        ranks.close()


def test_hosts_that_the_system_does_not_allow_are_told_with_its_words_and_a_way_out(monkeypatch):
    monkeypatch.setattr(namespaces, "_HOLD", "echo Operation not permitted >&2; exit 1")
    said = prepared(SlowLinks())
    assert said.startswith("network namespaces cannot be made here (it takes Linux, root, iproute2 and util-linux): ")
    way_out = "hvdlite-run -H HOST1,HOST2 python -m hvdlite.bench links --rates as-is"
    assert said.endswith(f"or measure between your own hosts: {way_out}")


def test_a_rank_that_is_alone_or_in_a_job_cannot_measure_what_was_asked(monkeypatch):
    assert prepared(SlowLinks(rates=("as-is",))).startswith(
        "--rates as-is: there is no other host: hvdlite-run -H HOST1,"
    )
    monkeypatch.setattr(links, "read_placement", lambda environ: "a job")
    assert prepared(SlowLinks()).startswith(
        "it makes hosts of its own: start it outside of any job, or pass --rates as-is"
    )


ROW = {"technique": "none", "samples_s": [2.0], "samples_bytes": [4.0]}
FOUND = {"ranks": 2, "hosts": ["host0", "host1"], "threads_per_rank": 1, "rows": [ROW]}


class MadeHosts:
    """Hosts whose ranks say something, and measure nothing or fail."""

    cores = 2

    def __init__(self, exit_code: int) -> None:
        self._ends = f"import sys; print('what a rank says', file=sys.stderr); sys.exit({exit_code})"

    def limit(self, rate: str) -> None: ...

    def start(self, command, environ, stderr):
        Path(command[-1]).write_text(json.dumps(FOUND))
        return [subprocess.Popen([sys.executable, "-c", self._ends], stderr=stderr)]

    def end_ranks(self) -> None: ...


@pytest.mark.parametrize("exit_code", [0, 3])
def test_what_ranks_of_its_own_hosts_say_is_told_if_they_fail(exit_code, capsys):
    command = SlowLinks(rates=("1gbit",), techniques=("none",))
    command._run_on(MadeHosts(exit_code), SimpleNamespace(progress=lambda *_: None))
    assert capsys.readouterr().err == ("what a rank says\n" if exit_code else "")
    assert command.cases[0].samples == ({} if exit_code else {"none": [2.0]})


@pytest.mark.parametrize(
    ("programs", "failure"),
    [
        (("0", "0"), None),
        (("0", "raise SystemExit(3)"), "rank 1 ended with exit code 3, after what stderr says"),
        (("import time; time.sleep(600)", "raise SystemExit(3)"), "rank 1 ended with exit code 3, after"),
    ],
    ids=["both end well", "one fails", "one fails and the other waits"],
)
def test_ranks_are_waited_for_until_all_have_ended_or_one_fails(programs, failure):
    processes = [subprocess.Popen([sys.executable, "-c", text]) for text in programs]
    try:
        said = links.failure_of(processes)
        assert said == failure if failure is None else (said is not None and said.startswith(failure))
    finally:
        for each in processes:
            each.kill()
            each.wait()


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_trains_and_its_warm_up_is_whole_intervals(name):
    assert TECHNIQUES[name].warm_ups % TECHNIQUES[name].interval == 0
    hvd.init()
    ranks = Ranks(current_world(), "cpu")
    try:
        training = TECHNIQUES[name].make(ranks, torch.nn.Linear(32, 16))
        batch = (torch.randn(4, 32), torch.randint(16, (4,)))
        before = [param.detach().clone() for param in training.model.parameters()]
        training.step(batch)
        for param, old in zip(training.model.parameters(), before, strict=True):
            assert not torch.equal(param, old)
        training.close()
    finally:
        ranks.close()
