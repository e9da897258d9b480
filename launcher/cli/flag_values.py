"""Converts the words of flags into numbers. A function raises `argparse.ArgumentTypeError` for a word that is none.

`flag_parser`, `elastic_flags` and `horovodrun_flags` call these, and `hvdlite_run` for variables that stand for flags.
"""

from __future__ import annotations

import argparse
import math
import re

_DECIMAL = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?")


def decimal(text: str) -> float:
    """Parses a number in ASCII digits; returns nan for anything else. float() would accept digits of all scripts."""
    return float(text) if _DECIMAL.fullmatch(text.strip()) else math.nan


def workers(text: str) -> int:
    # int() alone accepts " 4_0 ", and numbers that no machine can run.
    if not (_is_whole(text) and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers, such as 4")
    return int(text)


def count(text: str) -> int:
    """Parses a whole number, which may be 0."""
    if not _is_whole(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, such as 3")
    return int(text)


def ranks(text: str) -> frozenset[int]:
    words = text.split(",")
    if not all(map(_is_whole, words)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks, such as 0 or 0,1")
    return frozenset(map(int, words))


def seconds(text: str) -> float:
    number = decimal(text)
    if not 0 <= number <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to a day, such as 10")
    return number


def positive_seconds(text: str) -> float:
    if number := seconds(text):
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not more than 0 seconds, such as 60")


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, such as 22")
    return int(text)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6
