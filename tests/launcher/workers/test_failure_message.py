"""The message about the worker that failed first."""

from hvdlite_launcher.system.process_tree import shell_code
from hvdlite_launcher.workers.failure_message import Failure, Tail, failure_message


def _tail(text: str) -> list[str]:
    tail = Tail()
    tail.add(text.encode())
    return tail.lines()


def test_the_last_traceback_is_shown_without_what_came_before():
    text = "Traceback (most recent call last):\n  an old one\nwarning\nTraceback (most recent call last):\n  x\nE: y\n"
    assert _tail(text) == ["Traceback (most recent call last):", "  x", "E: y"]


def test_a_traceback_keeps_the_one_that_led_to_it():
    chain = (
        "Traceback (most recent call last):\n  cause\nKeyError: 1\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n  effect\nValueError: 2\n"
    )
    assert _tail("noise\n" + chain) == chain.splitlines()


def test_a_traceback_with_torchs_prefix_is_one():
    lines = ["[rank1]: Traceback (most recent call last):", "[rank1]: E: y"]
    assert _tail("\n".join(["noise", *lines])) == lines


def test_without_a_traceback_the_last_lines_are_shown():
    assert _tail("".join(f"{i}\n" for i in range(500))) == [str(i) for i in range(450, 500)]


def test_a_flood_is_kept_only_at_its_end():
    tail = Tail()
    for i in range(20_000):
        tail.add(b"%060d\n" % i)
    assert tail.lines()[-1] == f"{19_999:060d}"
    assert len(tail._data) < 200_000


def test_of_a_bar_the_last_state_is_shown_and_bytes_that_are_no_text_harm_nothing():
    tail = Tail()
    tail.add(b"\r10%\r20%\n\xff\xfe\n")
    assert tail.lines() == ["20%", "\\xff\\xfe"]


def test_a_failure_names_rank_host_pid_and_code():
    text = failure_message(Failure(1, "localhost", 4242, 3, ["Traceback (most recent call last):", "E"]))
    assert text == (
        "rank 1 on localhost (pid 4242) failed first, with exit code 3. The end of its stderr:\n"
        "    Traceback (most recent call last):\n"
        "    E"
    )


def test_a_program_that_misses_horovod_is_told_how_it_finds_it():
    for last in (
        "ModuleNotFoundError: No module named 'horovod'",
        "[rank0]: ModuleNotFoundError: No module named 'horovod'",
    ):
        words = failure_message(Failure(0, "a", 1, 1, ["Traceback (most recent call last):", last])).splitlines()
        assert words[-2] == f"    {last}"
        assert words[-1].startswith("With hvdlite-run --horovod, a program that imports horovod gets hvdlite.")
        assert "PYTHONPATH=$PWD:$PYTHONPATH" in words[-1]
    other = "ModuleNotFoundError: No module named 'horovodrun'"
    assert "--horovod" not in failure_message(Failure(0, "a", 1, 1, [other]))


def test_a_signal_is_named():
    assert "killed by SIGSEGV. It wrote nothing to stderr." in failure_message(Failure(0, "a", 1, -11, []))
    assert "memory" in failure_message(Failure(0, "a", 1, -9, []))
    assert shell_code(-9) == 137


BAD = ["bad config"]


def test_a_failure_without_words_is_told_with_those_of_one_that_failed_with_it():
    first, other = Failure(1, "b", 11, 2, []), Failure(0, "a", 10, 2, BAD)
    assert failure_message(first, [other]) == (
        "rank 1 on b (pid 11) failed first, with exit code 2. It wrote nothing to stderr. "
        "rank 0 on a (pid 10) failed within half a second of it, with exit code 2. The end of its stderr:\n"
        "    bad config"
    )


def test_of_several_with_words_one_with_the_same_exit_code_is_quoted_then_the_first():
    first = Failure(3, "a", 13, 2, [])
    others = [
        Failure(0, "a", 10, 1, ["other code"]),
        Failure(2, "a", 12, 2, ["same"]),
        Failure(1, "a", 11, 2, ["late"]),
    ]
    assert failure_message(first, others).endswith("\n    same")
    assert failure_message(first, others[:1]).endswith("with exit code 1. The end of its stderr:\n    other code")


def test_one_with_words_of_its_own_needs_no_others():
    assert failure_message(Failure(1, "a", 11, 2, ["mine"]), [Failure(0, "a", 10, 2, BAD)]).endswith(
        "stderr:\n    mine"
    )


def test_where_nobody_wrote_to_stderr_the_end_of_stdout_is_shown():
    said = failure_message(Failure(1, "a", 11, 2, [], [f"step {i}" for i in range(9)]))
    assert said.splitlines() == [
        "rank 1 on a (pid 11) failed first, with exit code 2. It wrote nothing to stderr. The end of its stdout:",
        *(f"    step {i}" for i in range(4, 9)),
    ]
    by_other = failure_message(Failure(1, "a", 11, 2, []), [Failure(0, "a", 10, 2, [], BAD)])
    assert "rank 0 on a (pid 10) failed within half a second of it, with exit code 2" in by_other
    assert by_other.endswith("The end of its stdout:\n    bad config")


def test_a_worker_that_a_signal_ended_had_no_time_for_words_on_stdout():
    assert failure_message(Failure(0, "a", 1, -9, [], ["step 5"])).endswith("It wrote nothing to stderr.")
