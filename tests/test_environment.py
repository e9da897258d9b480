"""Environment variables, under hvdlite's names and Horovod's: how they are read, and what in hvdlite uses them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import horovod_names
import pytest
import torch
from hvdlite_launcher.plan.worker_environment import OWN_VARIABLES
from torch import nn
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.environment import (
    IGNORED,
    KNOWN,
    OF_USERS,
    PLACE_TAKEN,
    READ_BY_INIT,
    SET_FOR_WORKERS,
    TRACE,
    Environment,
    Given,
    read_environment,
    remarks_of_ignored,
)
from hvdlite.log import log, open_log
from hvdlite.optim.optimizer import DEFAULT_BUCKET_CAP_BYTES
from hvdlite.runtime.world import current_world

ROOT = Path(__file__).parents[1]

MEANINGS = [
    ("FUSION_THRESHOLD", "1048576", {"fusion_threshold_bytes": 1 << 20}),
    ("FUSION_THRESHOLD", "0", {"fusion_threshold_bytes": 0}),
    ("AUTOTUNE", "1", {"autotune": True}),
    ("AUTOTUNE", "0", {}),
    ("AUTOTUNE_LOG", "/tmp/a.json", {"autotune_log": "/tmp/a.json"}),
    ("TIMELINE", "/tmp/t.json", {"timeline": "/tmp/t.json"}),
    ("TIMELINE", "DYNAMIC", {"timeline": "DYNAMIC"}),
    ("STALL_CHECK_DISABLE", "1", {"stall_check": False}),
    ("STALL_CHECK_DISABLE", "0", {}),
    ("STALL_CHECK_TIME_SECONDS", "5", {"stall_warning_s": 5.0}),
    ("STALL_SHUTDOWN_TIME_SECONDS", "90", {"stall_shutdown_s": 90.0}),
    ("STALL_SHUTDOWN_TIME_SECONDS", "0", {}),
    ("STALL_SHUTDOWN_TIME_SECONDS", "4", {"stall_shutdown_s": 4.0, "stall_warning_s": 2.0}),
    ("LOG_LEVEL", "trace", {"log_level": TRACE}),
    ("LOG_LEVEL", "WARNING", {"log_level": logging.WARNING}),
    ("LOG_LEVEL", "fatal", {"log_level": logging.CRITICAL}),
    ("LOG_HIDE_TIME", "1", {"log_hide_time": True}),
    ("GLOO_TIMEOUT_SECONDS", "30", {"timeout_s": 30.0}),
    ("HIERARCHICAL_ALLREDUCE", "1", {"hierarchical": True}),
    ("HIERARCHICAL_ALLREDUCE", "0", {"hierarchical": False}),
]


NUMBERS = ["FUSION_THRESHOLD", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS", "GLOO_TIMEOUT_SECONDS"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "text",
    [
        *(
            "\N{ARABIC-INDIC DIGIT THREE}",
            "\N{FULLWIDTH DIGIT TWO}",
            "\N{SUPERSCRIPT TWO}",
            "1_0",
            "0x10",
            "1e",
            "e1",
            ".",
        ),
        *("-1", "inf", "nan", "1e999", "1e18", "9" * 5000, "1 0", "True", "1e", "--1", "1,5"),
    ],
)
def test_a_number_is_written_in_ascii_and_no_longer_than_can_be_waited(name, text):
    with pytest.raises(ValueError, match=f"HVDLITE_{name}="):
        read_environment({f"HVDLITE_{name}": text})


@pytest.mark.parametrize("prefix", ["HVDLITE", "HOROVOD"])
@pytest.mark.parametrize(("name", "text", "said"), MEANINGS)
def test_a_variable_means_the_same_under_both_names(prefix, name, text, said):
    assert read_environment({f"{prefix}_{name}": text}) == replace(Environment(), **said)


def test_hvdlites_name_wins_and_an_empty_one_says_nothing():
    environ = {"HVDLITE_FUSION_THRESHOLD": "1", "HOROVOD_FUSION_THRESHOLD": "2"}
    assert read_environment(environ).fusion_threshold_bytes == 1
    assert read_environment(environ | {"HVDLITE_FUSION_THRESHOLD": ""}).fusion_threshold_bytes is None
    assert read_environment({}) == Environment()


def test_the_stall_check_has_short_names_too():
    environ = {"HVDLITE_STALL_CHECK_TIME_S": "1.5", "HVDLITE_STALL_SHUTDOWN_S": "2.5"}
    read = read_environment(environ)
    assert (read.stall_warning_s, read.stall_shutdown_s, read.remarks) == (1.5, 2.5, ())


def test_only_hvdlites_own_name_turns_the_check_off():
    assert not read_environment({"HVDLITE_CHECK": "0"}).check
    assert read_environment({"HOROVOD_CHECK": "0"}).check


@pytest.mark.parametrize(("text", "meaning"), [("", True), ("0", False), ("1", 1), ("1000", 1000)])
def test_a_variable_says_how_often_parameters_are_compared(text, meaning):
    read = read_environment({"HVDLITE_CHECK_PARAMETERS": text}).check_parameters
    assert read == meaning
    assert type(read) is type(meaning)


@pytest.mark.parametrize(
    ("environ", "remark"),
    [
        (
            {"HOROVOD_STALL_CHECK_TIME_SECONDS": "60", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"},
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=30 has no effect: it must be longer than the 60 s after which the "
            "warning comes",
        ),
        (
            {"HVDLITE_STALL_CHECK_DISABLE": "1", "HVDLITE_STALL_SHUTDOWN_S": "90"},
            "HVDLITE_STALL_SHUTDOWN_S=90 has no effect, because the stall check is turned off",
        ),
    ],
)
def test_an_end_that_cannot_come_is_said_to_have_no_effect(environ, remark):
    read = read_environment(environ)
    assert read.stall_shutdown_s is None
    assert read.remarks == (remark,)


def test_a_size_of_buckets_that_is_given_is_not_measured():
    read = read_environment({"HOROVOD_AUTOTUNE": "1", "HVDLITE_FUSION_THRESHOLD": "0"})
    remark = (
        "HOROVOD_AUTOTUNE=1 has no effect, because HVDLITE_FUSION_THRESHOLD=0 (--fusion-threshold-mb) sets the size of "
        "the buckets: unset it to have the size measured"
    )
    assert (read.autotune, read.fusion_threshold_bytes, read.remarks) == (False, 0, (remark,))


def test_all_that_mean_nothing_here_are_named_in_one_line_with_why():
    (remark,) = read_environment(dict.fromkeys(IGNORED, "7")).remarks
    assert "\n" not in remark
    assert all(name in remark and why in remark for name, why in IGNORED.items())
    assert read_environment({"HOROVOD_CONTROLLER": "gloo", "HOROVOD_AUTOTUNE": "0"}).remarks == ()


def test_one_that_is_not_known_is_named_and_a_launchers_own_are_not():
    environ = {"HOROVOD_STALL_CHECK_TIME": "5", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CCL_CACHE": "9"}
    assert read_environment(environ).remarks == (
        "these variables are set and have no effect in hvdlite: HOROVOD_CCL_CACHE (hvdlite does not use oneCCL); "
        "HOROVOD_GPU_OPERATIONS (hvdlite has nothing to build); HOROVOD_STALL_CHECK_TIME (unknown; did you "
        "mean HOROVOD_STALL_CHECK_TIME_SECONDS?)",
    )
    place = {name: "1" for name in OWN_VARIABLES if name.startswith(("HOROVOD_", "HVDLITE_"))}
    assert len(place) == 8 + 12
    launchers = {"HOROVOD_START_TIMEOUT": "9", "HOROVOD_ELASTIC_TIMEOUT": "9"}
    assert read_environment({**place, **launchers, "HOROVOD_SPELT_WRONG": ""}).remarks == ()


def test_one_of_hvdlites_prefix_that_is_misspelt_is_named_with_what_was_likely_meant():
    environ = {"HVDLITE_FUSION_TRESHOLD": "5", "HVDLITE_CHECKS": "0", "HVDLITE_OF_NOBODY": "1", "HVDLITE_EMPTY": ""}
    assert read_environment(environ).remarks == (
        "these variables are set and have no effect in hvdlite: HVDLITE_CHECKS (unknown; did you mean HVDLITE_CHECK?); "
        "HVDLITE_FUSION_TRESHOLD (unknown; did you mean HVDLITE_FUSION_THRESHOLD?); HVDLITE_OF_NOBODY (unknown)",
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HOROVOD_CHECK_PARAMETERS", "HVDLITE_CHECK_PARAMETERS"),
        ("HOROVOD_CHECK", "HVDLITE_CHECK"),
        ("HOROVOD_SHM", "HVDLITE_SHM"),
        ("HOROVOD_STALL_SHUTDOWN_S", "HVDLITE_STALL_SHUTDOWN_S"),
        ("HOROVOD_CHECK_PARAMETRES", "HVDLITE_CHECK_PARAMETERS"),
        ("HOROVOD_FUSION_TRESHOLD", "HOROVOD_FUSION_THRESHOLD"),
    ],
)
def test_horovods_prefix_on_a_variable_that_hvdlite_alone_has_is_named_with_the_right_one(name, meant):
    said = f"these variables are set and have no effect in hvdlite: {name} (unknown; did you mean {meant}?)"
    assert read_environment({name: "1"}).remarks == (said,)


def test_horovods_own_with_hvdlites_prefix_say_why_they_have_no_effect():
    why_of = {name.replace("HOROVOD_", "HVDLITE_"): why for name, why in IGNORED.items()}
    (remark,) = read_environment(dict.fromkeys(why_of, "7")).remarks
    assert all(name in remark and why in remark for name, why in why_of.items())
    assert "not known" not in remark
    assert read_environment({"HVDLITE_CONTROLLER": "gloo"}).remarks == ()


def rows_of_page() -> dict[tuple[str, ...], list[str]]:
    """Returns the rows of the page's table, each by the names in it, as texts of the columns after these."""
    page = (ROOT / "docs" / "variables.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"(?m)^\| `.*$", page)]
    return {tuple(re.findall(r"\w+", names)): columns for names, *columns in rows}


def test_the_page_of_variables_lists_what_a_user_may_set_as_the_table_has_it():
    listed = [(set(names), horovods) for names, (horovods, *_) in rows_of_page().items()]
    assert listed == [
        ({name for name in each.names if name.startswith("HVDLITE_")}, "✓" if each.is_horovods else "–")
        for each in OF_USERS
    ]


def test_a_default_that_the_page_has_as_a_value_is_the_one_that_counts():
    unset = replace(Environment(), fusion_threshold_bytes=DEFAULT_BUCKET_CAP_BYTES)
    pages = {names[0]: default for names, (_, _, default, _) in rows_of_page().items() if default.isdigit()}
    written = {field: each for field, each in READ_BY_INIT.items() if f"HVDLITE_{each.name}" in pages}
    assert len(written) == 14
    for field, variable in written.items():
        name = f"HVDLITE_{variable.name}"
        assert variable.read(Given(name, pages[name])) == getattr(unset, field), field


def test_all_variables_of_horovods_are_in_the_table_and_none_besides():
    horovods = {*IGNORED, *(name for name in KNOWN if name.startswith("HOROVOD_"))}
    of_building = {"HOROVOD_GPU_OPERATIONS", "HOROVOD_WITH_PYTORCH"}
    assert horovods | of_building == set(horovod_names.VARIABLES)


def test_every_name_in_the_table_is_there_once():
    names = [*(name for each in OF_USERS for name in each.names), *SET_FOR_WORKERS]
    assert len(names) == len(set(names)) == len(KNOWN - {PLACE_TAKEN})


def test_every_variable_that_sources_and_pages_name_is_known():
    texts = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "hvdlite").rglob("*.py"),
        *(ROOT / "launcher").rglob("*.py"),
    ]
    names = {name for path in texts for name in re.findall(r"\bHVDLITE_[A-Z][A-Z_]*[A-Z]\b", path.read_text())}
    assert len(names) > 20
    for name in names:
        # Its value may be wrong; only that it is set is known.
        assert remarks_of_ignored({name: "1"}) == (), name


def test_what_hvdlite_run_tells_is_read_by_the_table_alone():
    reads = re.compile(r"""environ(\.get\(|\[)["']HVDLITE_|["']HVDLITE_\w+["'] in (os\.)?environ""")
    # The table of launchers has the variables of rank and size, hvdlite-run's among them.
    paths = [path for path in (ROOT / "hvdlite").rglob("*.py") if path.parent.name != "rendezvous"]
    assert [str(path) for path in paths if reads.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "-1", "not a number of bytes, such as 16777216, or 0 for no fusion"),
        ("HVDLITE_FUSION_THRESHOLD", "16MB", "not a number of bytes"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "0", "not a positive number of seconds, such as 60$"),
        ("HVDLITE_STALL_SHUTDOWN_S", "nan", "not a positive number of seconds, such as 60, or 0 for never"),
        ("HVDLITE_STALL_CHECK_TIME_S", "soon", "not a positive number of seconds"),
        ("HVDLITE_CHECK", "off?", "neither 1 nor 0"),
        ("HVDLITE_CHECK_PARAMETERS", "-1", "neither 0, for no comparison of parameters, nor the number of steps"),
        ("HVDLITE_CHECK_PARAMETERS", "often", "neither 0"),
        ("HOROVOD_LOG_LEVEL", "loud", "not a log level: use one of trace, debug, info, warning, error, fatal"),
    ],
)
def test_a_wrong_value_is_an_error_of_init_that_names_the_variable(monkeypatch, name, text, said):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"^{name}='{text.replace('?', '.')}' is {said}"):
        hvd.init()
    assert not hvd.is_initialized()


@pytest.fixture
def _left_afterwards():
    yield
    hvd.shutdown()
    open_log(Environment(), 0)


@pytest.mark.usefixtures("_left_afterwards")
def test_init_reads_the_variables_and_says_once_what_has_no_effect(monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HVDLITE_LOG_LEVEL", "info")
    monkeypatch.setenv("HVDLITE_LOG_HIDE_TIME", "1")
    hvd.init()
    hvd.init()
    log.debug("not seen")
    assert current_world().environment.log_level == logging.INFO
    assert capsys.readouterr().err == (
        "hvdlite[0] WARNING: these variables are set and have no effect in hvdlite: HOROVOD_CYCLE_TIME "
        "(hvdlite has no cycles: a collective starts when the ranks call it)\n"
        f"hvdlite[0] INFO: 1 rank on 1 host; OMP threads {torch.get_num_threads()}\n"
    )


def test_the_log_has_one_handler_where_a_level_is_set_and_none_elsewhere(capsys):
    before = list(log.handlers)
    open_log(Environment(log_level=TRACE), 2)
    open_log(Environment(log_level=TRACE), 3)
    log.log(TRACE, "seen")
    assert capsys.readouterr().err.endswith(" hvdlite[3] TRACE: seen\n")
    open_log(Environment(), 0)
    assert log.handlers == before
    assert log.propagate


def test_the_fusion_threshold_is_the_cap_of_buckets_unless_one_is_given():
    def caps(rank: int) -> list[int]:
        params = [nn.Parameter(torch.zeros(3))]
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), bucket_cap_mb=cap_mb) for cap_mb in (None, 1)
        ]
        return [optimizer._reducer.settings.cap_bytes for optimizer in optimizers]

    for threshold, expected in ((0, 0), (4096, 4096), (None, 16 << 20)):
        assert run_worlds(1, caps, Environment(fusion_threshold_bytes=threshold)) == [[expected, 1 << 20]]
