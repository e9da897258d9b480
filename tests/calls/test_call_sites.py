"""The line of the program at which a thread is, as warnings about waiting ranks report it."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hvdlite
from hvdlite.calls import call_sites
from hvdlite.calls.call_sites import LONGEST, FramesOfThreads, place_of, places_of_threads, seen_from_here
from hvdlite.comm.step_clock import Phase, StepClock
from hvdlite.control import reports
from hvdlite.control.reports import PaceReports
from hvdlite.runtime import hang_report
from hvdlite.runtime.hang_report import stacks_of_threads


def in_a_loop() -> None:
    while not _over.is_set():
        pass


def in_a_c_function() -> None:
    _lock.acquire()
    _lock.release()


def in_the_standard_library() -> None:
    _over.wait()


def in_torch() -> None:
    class Function(torch.nn.Module):
        def forward(self) -> None:
            _over.wait()

    torch.nn.Sequential().register_forward_hook(lambda *_: None)
    Function()()


_over = threading.Event()
_lock = threading.Lock()

PLACES = {
    in_a_loop: "in in_a_loop",
    in_a_c_function: "in in_a_c_function (_lock.acquire)",
    in_the_standard_library: "in in_the_standard_library (threading.Event.wait)",
    in_torch: "in forward (threading.Event.wait)",
}


def is_within(ident: int, name: str) -> bool:
    """Whether the thread is in the function of that name, or in one that it calls."""
    with FramesOfThreads() as frames:
        frame = frames.get(ident)
        while frame is not None:
            if frame.f_code.co_name == name:
                return True
            frame = frame.f_back
    return False


@pytest.fixture
def started():
    """Starts a thread and returns its ident; the thread ends with the test."""
    threads = []
    _over.clear()
    _lock.acquire()

    def start(function: Callable[[], None], name: str | None = None) -> int:
        thread = threading.Thread(target=function, name=name)
        threads.append(thread)
        thread.start()
        return thread.ident

    yield start
    _over.set()
    _lock.release()
    for thread in threads:
        thread.join()


def place_once(holds: Callable[[str], bool], *idents: int) -> str:
    """Returns the thread's line once it is the expected one, since a thread takes a moment to get there."""
    give_up_at_s = time.monotonic() + 60
    while not holds(place := places_of_threads(idents)) and time.monotonic() < give_up_at_s:
        time.sleep(0.01)
    return place


@pytest.mark.parametrize("function", PLACES)
def test_a_place_is_the_users_innermost_line_and_what_that_calls(started, function):
    expected = PLACES[function]
    if sys.version_info < (3, 11):
        expected = expected.replace(" (_lock.acquire)", "").replace("Event.", "")
    place = place_once(lambda place: place.endswith(expected), started(function))
    assert "test_call_sites.py:" in place
    assert place.endswith(expected)


def test_of_several_threads_each_is_told_of_and_only_some_of_many(started):
    idents = [started(in_the_standard_library, f"loader {number}") for number in range(5)]
    place = place_once(lambda place: place.count("in_the_standard_library") == 3, *idents)
    assert place.count("thread 'loader ") == 2
    assert place.endswith(" and 2 more threads")
    assert len(place) <= LONGEST


def test_where_no_thread_is_known_or_all_have_ended_it_is_where_the_main_thread_is():
    thread = threading.Thread(target=int)
    thread.start()
    ident = thread.ident
    thread.join()
    for idents in ([], [ident]):
        assert "in test_where_no_thread_is_known" in places_of_threads(idents)


def test_of_a_program_that_is_installed_it_is_its_innermost_line(started):
    # As if the standard library contained it: no frame of the thread is in the user's code.
    names = {"over": _over, "__name__": "installed"}
    exec(
        compile("def serve():\n    over.wait()\n", threading.__file__.replace("threading", "installed"), "exec"), names
    )
    place = place_once(lambda place: "Event.wait" not in place and "wait" in place, started(names["serve"]))
    assert re.search(r"threading.py:\d+ in wait \(", place)


def test_a_place_needs_no_file_of_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"place_of": place_of, "sys": sys}
    exec(compile("def f():\n    return place_of(sys._getframe())\nplace = f()", "/no/such/train.py", "exec"), names)
    assert names["place"].startswith("/no/such/train.py:2 in f")


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_the_interpreter_lists_its_threads(monkeypatch, collects):
    """A finalizer that lets a starting thread run there would be a deadlock."""
    list_frames = sys._current_frames
    seen: list[bool] = []

    def listed():
        seen.append(gc.isenabled())
        return list_frames()

    monkeypatch.setattr(sys, "_current_frames", listed)
    was_enabled = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with FramesOfThreads() as frames:
            assert threading.get_ident() in frames
            assert not gc.isenabled()
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_none_is_collected_either_while_two_threads_list_them(monkeypatch):
    list_frames = sys._current_frames
    other_lists, first_is_over = threading.Event(), threading.Event()
    seen: list[bool] = []

    def listed():
        if threading.current_thread() is other:
            other_lists.set()
            first_is_over.wait()
            seen.append(gc.isenabled())
        else:
            other.start()
            other_lists.wait(0.2)  # it must not come
        return list_frames()

    def list_once():
        with FramesOfThreads():
            pass

    other = threading.Thread(target=list_once)
    monkeypatch.setattr(sys, "_current_frames", listed)
    list_once()
    first_is_over.set()
    other.join()
    assert (seen, gc.isenabled()) == ([False], True)


@pytest.mark.parametrize("walk", [places_of_threads, stacks_of_threads, PaceReports.look])
def test_no_garbage_is_collected_while_the_frames_of_other_threads_are_followed(started, monkeypatch, walk):
    """On Python 3.11 a finalizer that lets such a thread go on would leave frames of which the memory is used again."""
    ident = started(in_the_standard_library)
    while not is_within(ident, "in_the_standard_library"):
        time.sleep(0.01)
    seen: list[bool] = []

    def spy(module, name):
        follow = getattr(module, name)
        monkeypatch.setattr(module, name, lambda frame: (seen.append(gc.isenabled()), follow(frame))[1])

    spy(call_sites, "place_of")
    spy(hang_report, "_frames")
    spy(reports, "is_in_model")
    if walk is places_of_threads:
        walk([ident])
    elif walk is stacks_of_threads:
        walk()
    else:
        clock = StepClock()
        clock.phase, clock.thread = Phase.LOAD, ident
        watch, group = SimpleNamespace(clock=clock), SimpleNamespace(size=1)
        walk(PaceReports(SimpleNamespace(watch=watch, group=group, send=lambda _: None)))
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_every_list_of_threads_is_made_with_the_collector_off():
    """`sys._current_frames` is called in one place."""
    package = Path(hvdlite.__file__).parent
    callers = [path.name for path in package.rglob("*.py") if "_current_frames()" in path.read_text()]
    assert callers == ["call_sites.py"]


def test_a_path_is_seen_from_where_the_program_runs_and_stays_whole_where_that_is_gone(monkeypatch, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert seen_from_here(str(here / "train.py")) == "train.py"
    assert seen_from_here(str(tmp_path / "other.py")) == str(tmp_path / "other.py")
    here.rmdir()
    assert seen_from_here(str(here / "train.py")) == str(here / "train.py")
