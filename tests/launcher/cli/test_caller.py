"""The errors that run() raises before it starts anything."""

import pickle
import subprocess
import threading

import pytest
from hvdlite_launcher import JobError, run
from hvdlite_launcher.cli.caller import FunctionResults, _returned
from hvdlite_launcher.errors import UsageError

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [(LOCK.acquire, (), {}), (lambda: LOCK, (), {}), (print, (1, LOCK), {}), (print, (), {"end": LOCK})],
)
def test_what_cannot_be_sent_to_the_workers_is_told(func, args, kwargs):
    with pytest.raises(pickle.PicklingError, match=r"^func, args or kwargs cannot be pickled for the workers: .*lock"):
        run(func, args, kwargs, np=1)


def test_arguments_that_are_none_are_named():
    with pytest.raises(TypeError, match=r"run\(\): args must be a sequence of arguments, such as \(1,\), not 1"):
        run(print, 1, np=1)
    with pytest.raises(TypeError, match=r"run\(\): args must be a sequence of arguments, such as \('ab',\), not 'ab'"):
        run(print, "ab", np=1)
    with pytest.raises(TypeError, match=r"run\(\): kwargs must be a mapping from names to arguments, not \("):
        run(print, (), ("a",), np=1)


@pytest.mark.parametrize(
    ("flags", "error", "said"),
    [
        ({"nmp": 2}, TypeError, "run() has no argument 'nmp'; did you mean np?"),
        ({"prefix_output_with_timestmp": True}, TypeError, "did you mean prefix_output_with_timestamp?"),
        ({"dry_run": True}, TypeError, "run() has no argument 'dry_run'"),
        ({"np": 0}, ValueError, "np: '0' is not a number of workers, such as 4"),
        ({"np": True}, ValueError, "np: 'True' is not a number of workers"),
        ({"np": [1]}, ValueError, "np: it must be a single value, not a list"),
        ({"np": 1, "grace": -1}, ValueError, "grace: '-1' is not a number of seconds"),
        ({"np": 1, "verbose": 2}, ValueError, "verbose: '2' is neither true nor false"),
        ({"np": 1, "environment": {"A=B": 1}}, ValueError, "environment: the name of a variable cannot contain ="),
    ],
)
def test_what_is_no_flag_is_named(flags, error, said):
    with pytest.raises(error) as caught:
        run(print, **flags)
    assert said in str(caught.value)


TEXT_ARGUMENTS = [
    *("hosts", "hostfile", "output_filename", "ssh_identity_file", "ssh_args", "ssh_program", "remote_python"),
    *("network_interface", "config_file", "timeline_filename", "autotune_log_file", "log_level"),
]
NUMBER_ARGUMENTS = [
    *("np", "ssh_port", "grace", "start_timeout", "fusion_threshold_mb", "cycle_time_ms", "gloo_timeout_seconds"),
    *("stall_check_warning_time_seconds", "stall_check_shutdown_time_seconds", "cache_capacity"),
]
NO_TEXTS = [b"a", bytearray(b"a"), [None], [b"a"], object(), "a\0b", "\ud800"]
# int() and float() accept the digits of other scripts.
NO_NUMBERS = [
    *(
        b"2",
        "",
        "x",
        "1_0",
        "\N{ARABIC-INDIC DIGIT THREE}",
        "\N{FULLWIDTH DIGIT TWO}",
        "\N{SUPERSCRIPT TWO}",
        "inf",
        "nan",
    ),
    *(float("inf"), float("nan"), -1, 10**5000, True, [1, 2], {1: 2}, 1j, object(), "2\0", "0x10"),
]


@pytest.mark.parametrize("argument", [*TEXT_ARGUMENTS, *NUMBER_ARGUMENTS, "environment"])
def test_no_argument_takes_what_nobody_would_write_on_a_command_line(argument):
    others = {} if argument == "np" else {"np": 1}
    wrong = NO_TEXTS if argument in TEXT_ARGUMENTS else NO_NUMBERS
    if argument == "environment":
        wrong = [{"A": b"b"}, {"A": "a\0b"}, {"A": [1]}, [b"A"], [None], b"A"]
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=argument) as caught:
            run(print, **others, **{argument: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("func", [None, 5, "print"])
def test_what_cannot_be_called_is_named(func):
    with pytest.raises(TypeError, match=r"run\(\) needs a function, not "):
        run(func, np=1)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(None, {}), (5, {}), (b"ab", {}), ({"a": 1}, {}), ((), {1: 2}), ((), 5), ((), "a")],
)
def test_what_are_no_arguments_for_it_is_named(args, kwargs):
    with pytest.raises(TypeError, match=r"run\(\): (args|kwargs) must be "):
        run(print, args, kwargs, np=1)


class ToldError(Exception):
    pass


class UnknownError(Exception):
    """An exception that cannot be unpickled, as its constructor needs other arguments than its pickle has."""

    def __init__(self, one, two):
        super().__init__(one)


ESCAPE = "\x1b]0;a title\x07 and \x1b[31mred\x1b[0m"
SHOWN = r"\x1b]0;a title\x07 and " + "\x1b[31mred\x1b[0m"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ToldError(ESCAPE, 5), ToldError, (SHOWN, 5)),
        (ToldError("plain"), ToldError, ("plain",)),
        (UnknownError(ESCAPE, 2), JobError, (f"rank 1 on a host raised UnknownError: {SHOWN}",)),
    ],
)
def test_a_terminal_shows_the_words_of_a_workers_exception_and_obeys_none_of_them(error, kind, said):
    told = {
        "value": None,
        "generation": None,
        "rank": 1,
        "size": 2,
        "host": "a host",
        "error": pickle.dumps(error),
        "summary": f"UnknownError: {ESCAPE}",
    }
    results = FunctionResults(
        returns={1: pickle.dumps({**told, "traceback": f"Traceback\n{ESCAPE}\n"})}, exit_code=1, rank=1
    )
    with pytest.raises(kind) as caught:
        _returned(results)
    assert caught.value.args == said
    assert SHOWN in str(caught.value.__cause__)
    assert ESCAPE not in str(caught.value.__cause__)


@pytest.mark.parametrize(("exit_code", "kind"), [(UsageError.exit_code, ValueError), (1, JobError)])
def test_so_it_does_with_the_launchers_report(exit_code, kind):
    with pytest.raises(kind) as caught:
        _returned(FunctionResults(returns={}, exit_code=exit_code, rank=None, message=f"a worker said {ESCAPE}"))
    assert str(caught.value) == f"a worker said {SHOWN}"


def told(generation: int | None, rank: int | None, size: int | None, value: object) -> bytes:
    place = {"generation": generation, "rank": rank, "size": size, "host": "a"}
    if isinstance(value, Exception):
        error = {"error": pickle.dumps(value), "summary": "", "traceback": "where"}
        return pickle.dumps({**place, "value": None, **error})
    return pickle.dumps({**place, "value": pickle.dumps(value)})


def test_of_an_elastic_job_the_ranks_of_the_last_world_count():
    returns = {
        0: told(1, 0, 3, "left"),
        1: told(2, 0, 2, "old"),
        2: told(1, 2, 3, ToldError("lost")),
        5: told(2, 1, 2, "new"),
    }
    assert _returned(FunctionResults(exit_code=0, returns=returns)) == ["old", "new"]
    del returns[5]
    with pytest.raises(JobError, match="rank 1 ended with exit code 0"):
        _returned(FunctionResults(exit_code=0, returns=returns))


def test_a_function_of_an_elastic_job_that_never_asks_for_a_rank_is_told_so():
    with pytest.raises(JobError, match=r"must call hvd.init\(\)"):
        _returned(FunctionResults(exit_code=0, returns={0: told(0, None, None, 1)}))
    with pytest.raises(ToldError, match="before init"):
        _returned(FunctionResults(exit_code=1, returns={0: told(0, None, None, ToldError("before init"))}))
