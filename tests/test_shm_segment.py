"""Memory that the ranks of a host share, seen by another rank."""

from __future__ import annotations

import pytest

from hvdlite.shm.segment import Segment


@pytest.mark.parametrize("stays", [True, False])
def test_what_others_look_at_stays_when_its_rank_has_done_with_it(stays):
    mine, others = Segment(), Segment()
    piece = mine.allocate(64, stays=stays)
    seen = others.see(mine.address, piece.offset, len(piece.memory))
    piece.tensor.fill_(7)
    assert seen.tensor[0] == 7
    del piece
    # Else it is back with the system, and would be zero to whoever looks.
    assert seen.tensor[0] == (7 if stays else 0)
