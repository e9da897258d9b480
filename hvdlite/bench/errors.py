"""
What is wrong with how the benchmark was called.
"""

from __future__ import annotations


class UsageError(Exception):
    """Told in one line, without a traceback, before anything is measured; the exit code is 2."""
