"""The errors a user sees as one line after `hvdlite-run: `, each with the exit code of the launcher."""

from __future__ import annotations


class LauncherError(Exception):
    """Something went wrong that one line can tell; never shown with a traceback."""

    exit_code = 1


class UsageError(LauncherError):
    """The command line asks for what cannot be done."""

    exit_code = 2


class JobError(LauncherError):
    """A job that `run` started ended neither with what the function returned nor with an exception of its own."""


class ProtocolError(LauncherError):
    """Bytes that are no frame of ours came from the other end."""
