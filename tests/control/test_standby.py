"""A worker that is not a rank yet is refused whatever needs other ranks, and is told why."""

from __future__ import annotations

import pytest
from ranks import run_ranks

from hvdlite.calls.operation import ALLREDUCE, Operation
from hvdlite.comm.recorder import Recorder
from hvdlite.control.unchecked import StandbyController
from hvdlite.errors import NotInitializedError


def test_an_operation_before_the_function_is_an_error_that_names_it_and_the_way_out():
    controller = StandbyController(1, Recorder())
    operation = Operation(ALLREDUCE, lambda _: None, "loss")
    with pytest.raises(NotInitializedError, match=r"allreduce of 'loss': this worker joins.*hvd\.elastic\.run"):
        run_ranks(1, lambda group: controller.submit(group, operation))
    with pytest.raises(NotInitializedError, match="joins"):
        controller.join(average_of_active=False, stand_in=lambda *_: None, sit_out=lambda *_: None)
