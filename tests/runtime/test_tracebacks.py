"""What an uncaught error prints: one line if another rank is the cause, otherwise the user's own lines only."""

import functools
import inspect
import signal
import sys
import threading

import pytest
import torch.distributed as dist

import hvdlite as hvd
from hvdlite.calls.handle import Handle
from hvdlite.errors import CommunicationError, MismatchError, PeerLostError, list_names, says_peer_lost
from hvdlite.runtime.tracebacks import remove_hooks, shorten_tracebacks

GONE = PeerLostError("allreduce of 'loss' failed\nbecause rank 0 (node1) has crashed")
LINE = "hvdlite.errors.PeerLostError: allreduce of 'loss' failed because rank 0 (node1) has crashed (at {}:{})\n"


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    """Provides Python's own hooks, which a test may replace."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Provides ``program(text, handle=...)``, which returns the uncaught error of a program, whose file is train.py."""
    monkeypatch.chdir(tmp_path)

    def run(text, **names):
        path = tmp_path / "train.py"
        path.write_text(text)
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever it is
            exec(compile(text, path, "exec"), names)
        error = caught.value
        # From the program's own lines on, as if Python had run it.
        while error.__traceback__.tb_frame.f_code.co_filename != str(path):
            error.__traceback__ = error.__traceback__.tb_next
        return error

    return run


def failed(error):
    handle = Handle("allreduce of 'loss'")
    handle.fail(error)
    return handle


class Interrupt:
    """Sends Ctrl-C at the beginning of a wait that takes more than a moment; the traceback has no line of Python's."""

    __enter__ = staticmethod(functools.partial(signal.raise_signal, signal.SIGINT))
    __exit__ = None


@pytest.fixture
def interrupted():
    handle = Handle("allreduce of 'loss'")
    handle.while_waiting = Interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield handle
    signal.signal(signal.SIGINT, before)


def printed(error, capsys):
    shorten_tracebacks()
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("handle.wait()", 1),
        ("def train():\n    handle.wait()\ntrain()", 2),
        ("try:\n    handle.wait()\nexcept Exception:\n    print('saving')\n    raise", 2),
        ("try:\n    handle.wait()\nexcept Exception as error:\n    raise error", 2),
    ],
    ids=["alone", "in a function", "caught and raised", "raised anew"],
)
def test_an_error_that_another_rank_is_gone_is_one_line_with_the_users_own(program, capsys, text, line):
    error = program(text, handle=failed(PeerLostError(str(GONE))))
    traceback = error.__traceback__
    assert printed(error, capsys) == LINE.format("train.py", line)
    # Code that looks at the error afterwards finds it unchanged.
    assert (str(error), error.__traceback__) == (str(GONE), traceback)


def test_one_that_comes_from_an_engines_words_is_one_line_too(program, capsys):
    lost = CommunicationError("broadcast failed")
    lost.__cause__ = RuntimeError("Connection closed by peer")
    error = program("handle.wait()", handle=failed(lost))
    assert printed(error, capsys) == "hvdlite.errors.CommunicationError: broadcast failed (at train.py:1)\n"
    assert isinstance(error.__cause__, RuntimeError)


def test_another_error_of_hvdlites_keeps_the_users_lines_and_nothing_below_them(program, capsys):
    mismatch = MismatchError("the shapes differ")
    mismatch.__cause__ = failed_inside()
    error = program("def train():\n    handle.wait()\n\ntrain()\n", handle=failed(mismatch))
    shown = printed(error, capsys)
    assert "train.py" in shown
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.endswith("hvdlite.errors.MismatchError: the shapes differ\n")
    assert shown.count("  File ") == 2
    assert "handle.py" not in shown
    assert "has crashed" not in shown


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("hvd.init(timeout_s=-1)", "ValueError: timeout_s=-1 is not a positive number of seconds, such as 60"),
        ("hvd.init(hierarchical=2)", "ValueError: hierarchical=2 is none of True, False and None"),
        ("hvd.init(process_sets='static')", "ValueError: "),
        ("hvd.init()", "ValueError: HVDLITE_SHM='maybe' is neither 1 nor 0"),
    ],
)
def test_what_is_wrong_about_a_call_of_init_is_told_with_the_users_lines_alone(
    program, capsys, monkeypatch, call, said
):
    monkeypatch.setenv("HVDLITE_SHM", "maybe")
    monkeypatch.delenv("HVDLITE_LOG_LEVEL", raising=False)
    error = program(f"def main():\n    {call}\n\nmain()\n", hvd=hvd)
    # init() itself has set the hook.
    sys.excepthook(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert shown.count("  File ") == shown.count("train.py") == 2
    assert shown.splitlines()[-1].startswith(said)


def test_the_whole_traceback_of_a_wrong_call_is_there_where_the_log_asks_for_it(program, capsys, monkeypatch):
    monkeypatch.setenv("HVDLITE_LOG_LEVEL", "debug")
    error = program("hvd.init(timeout_s=-1)", hvd=hvd)
    assert sys.excepthook is sys.__excepthook__
    sys.excepthook(type(error), error, error.__traceback__)
    assert "world.py" in capsys.readouterr().err


def test_a_fault_of_hvdlites_own_is_shown_whole(program, capsys, monkeypatch):
    monkeypatch.setattr("hvdlite.runtime.world.read_environment", functools.partial(int, "no number"))
    shown = printed(program("hvd.init()", hvd=hvd), capsys)
    assert "world.py" in shown
    assert "TypeError: " in shown


def failed_inside():
    """Returns an error whose traceback has only lines of hvdlite."""
    try:
        failed(PeerLostError(str(GONE))).wait()
    except PeerLostError as error:
        error.__traceback__ = error.__traceback__.tb_next
        return error


def test_an_error_of_the_users_own_is_whole_and_what_it_came_from_is_short(program, capsys):
    error = program("try:\n    handle.wait()\nfinally:\n    1 / 0\n", handle=failed(PeerLostError(str(GONE))))
    shown = printed(error, capsys)
    assert "has crashed\n\nDuring handling of the above exception" in shown
    assert shown.endswith("ZeroDivisionError: division by zero\n")
    assert "handle.py" not in shown


def test_a_users_own_hook_is_called_with_the_users_lines(program, capsys, monkeypatch):
    called = []
    monkeypatch.setattr(sys, "excepthook", lambda *told: called.append((*told, str(told[1]))))
    error = program("handle.wait()", handle=failed(PeerLostError(str(GONE))))
    assert printed(error, capsys) == ""
    ((kind, value, traceback, words),) = called
    assert (kind, value, words) == (PeerLostError, error, str(GONE))
    assert traceback.tb_next is None


def test_in_a_thread_it_is_one_line_after_the_threads_name(program, capsys):
    shorten_tracebacks()
    handle = failed(PeerLostError(str(GONE)))

    def run():
        exec(compile("\nhandle.wait()", "train.py", "exec"), {"handle": handle})

    thread = threading.Thread(target=run, name="loader")
    thread.start()
    thread.join()
    assert capsys.readouterr().err == "Exception in thread loader:\n" + LINE.format("train.py", 2)


def test_ctrl_c_in_a_wait_is_one_line_that_names_what_was_waited_for(program, capsys, interrupted):
    error = program("print('go')\nhandle.wait()", handle=interrupted)
    assert printed(error, capsys) == (
        "KeyboardInterrupt: interrupted while waiting in allreduce of 'loss' (at train.py:2)\n"
    )


def test_ctrl_c_in_a_wait_names_the_ranks_that_are_waited_for_where_they_are_known(program, capsys, interrupted):
    interrupted.waits_for = lambda: list_names([f"rank {rank} (node1)" for rank in (1, 3)], 7)
    error = program("print('go')\nhandle.wait()", handle=interrupted)
    assert "in allreduce of 'loss', which waits for rank 1 (node1), rank 3 (node1) and 5 more (at " in printed(
        error, capsys
    )


def test_ctrl_c_in_the_users_own_lines_is_one_line_that_names_the_innermost(program, capsys):
    error = program("def train():\n    raise KeyboardInterrupt\ntrain()")
    assert printed(error, capsys) == "KeyboardInterrupt: interrupted (at train.py:2)\n"


def test_what_the_program_says_with_an_interrupt_of_its_own_is_kept(program, capsys):
    error = program("raise KeyboardInterrupt('enough')")
    assert printed(error, capsys) == "KeyboardInterrupt: enough (at train.py:1)\n"


def test_ctrl_c_that_is_caught_in_a_wait_is_an_ordinary_one(interrupted):
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted.wait()
    assert type(caught.value) is KeyboardInterrupt


def test_hooks_that_are_set_again_are_called_once(program, capsys):
    error = program("handle.wait()", handle=failed(PeerLostError(str(GONE))))
    shorten_tracebacks()
    first = sys.excepthook
    assert printed(error, capsys) == LINE.format("train.py", 1)
    assert sys.excepthook is first


def test_the_hooks_of_earlier_worlds_are_removed(monkeypatch):
    users = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: users.append(error))
    chains = []
    for _ in range(3):
        remove_hooks()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        shorten_tracebacks()
        dist.destroy_process_group()
        chains.append(chain_of(sys.excepthook))
    assert chains == [["hvdlite.runtime.tracebacks", "torch.distributed.distributed_c10d", __name__]] * 3


def chain_of(hook):
    """The modules of the hooks, each of which calls the next."""
    behind = inspect.getclosurevars(hook).nonlocals
    following = behind.get("previous") or behind.get("old_hook")
    return [hook.__module__, *(chain_of(following) if following else [])]


def test_an_error_whose_str_raises_is_looked_at_like_any_other():
    class FaultyError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    error = FaultyError()
    assert not says_peer_lost(error)
    error.__cause__ = PeerLostError("rank 1 is gone")
    assert says_peer_lost(error)
