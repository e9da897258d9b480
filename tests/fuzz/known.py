"""Faults that are known and not mended yet: what programs leave out meanwhile. Each entry says what it would show."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "a scaler in a step that is not complete": "GradScaler unscales before the average, on some ranks",
    "surplus gradients": "another optimizer's gradients are added to, depending on time",
    "param_groups changed behind the wrapper": "parameters that it does not know are not averaged",
    "reading on one rank": "param_groups waits for the other ranks",
    "weights in some steps, with a codec": "what was kept in a step without weights is not scaled",
    "changes of sparse gradients on their way": "with sparse_as_dense they are lost without a word",
    "Adasum with a closure": "the closure's passes are counted in the next step",
}


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
