"""Faults that are known and not mended yet: what programs leave out meanwhile. Each entry says what it would show."""

from __future__ import annotations

KNOWN: dict[str, str] = {}


class Unsettled(Exception):  # noqa: N818
    """A program does what has no right answer, or is a known fault: what comes of it is not judged."""


def is_known(feature: str) -> bool:
    """Whether programs must do without this; the words are those that `drawing` asks with."""
    assert feature in FEATURES, feature
    return feature in KNOWN


def leave_if_known(feature: str) -> None:
    """Raises `Unsettled` for a known fault."""
    if is_known(feature):
        raise Unsettled(feature)


# What can be left out.
FEATURES = (
    "surplus gradients of some parameters, set to None",
    "surplus gradients of a step that GradScaler skips",
    "surplus gradients of a pass for Adasum",
    "param_groups changed, and the new parameter frozen before the step",
    "param_groups changed, and a rank without a backward pass",
    "unfreezing within a step",
    "gradients by hand",
    "a scaler in a step that is not complete",
    "surplus gradients",
    "param_groups changed behind the wrapper",
    "reading on one rank",
    "codecs",
    "join",
    "copies in the middle of a step",
    "Adasum with a closure",
    "changes of sparse gradients on their way",
    "weights in some steps, with a codec",
)
