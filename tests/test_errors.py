"""The reasons of errors are found in the errors that caused them."""

from __future__ import annotations

import errno
import os

import pytest

from hvdlite.errors import CommunicationError, lack_of

TOO_MANY = "this process has too many open files: close some, or raise the limit with ulimit -n"
OF_GLOO = "[enforce fail at gloo/transport/tcp/socket.cc:24] rv != -1. -1 vs -1. socket: Too many open files"


def caused_by(cause: Exception) -> CommunicationError:
    error = CommunicationError("rank 0 could not connect")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "f"),
        RuntimeError(OF_GLOO),
        RuntimeError(OF_GLOO.replace(" socket:", "")),
    ],
)
def test_what_the_process_lacks_is_found_behind_any_error(error):
    assert lack_of(error) == lack_of(caused_by(caused_by(error))) == TOO_MANY


@pytest.mark.parametrize(
    "error",
    [
        CommunicationError(f"rank 1 has ended: {os.strerror(errno.EMFILE)}"),
        RuntimeError("another rank has ended"),
        OSError(errno.ECONNREFUSED, "Connection refused"),
    ],
)
def test_what_another_rank_lacks_is_not_said_of_this_one(error):
    assert lack_of(error) is None
    assert lack_of(caused_by(error)) is None


def test_an_error_that_is_its_own_cause_is_looked_through_once():
    """Python makes one of ``raise error from error``."""
    error = RuntimeError("connection closed by peer")
    error.__cause__ = error
    assert lack_of(error) is None
