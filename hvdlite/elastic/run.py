"""
`run`: calls a training function again each time the ranks have changed, with its state restored or kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..comm.reduce_op import Max
from ..errors import CommunicationError, HvdliteError, StateLostError
from ..faults import point
from ..log import log
from ..ops.api import allreduce
from ..outside_graphs import keep_outside_graphs
from ..runtime.retry import Retry
from ..runtime.world import (
    current_world,
    enter_again,
    has_state,
    is_initialized,
    note_elastic_program,
    note_state,
    tell_of_elastic_program,
)
from .notifications import listening
from .state import HostsUpdatedInterrupt, State

Result = TypeVar("Result")

# How often the same ranks begin at the same commit.
_TRIES = 3


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate ``func(state, *args, **kwargs)`` so that it is called again when ranks are lost, come or go.

    Before each call the state of rank 0, the oldest worker, is sent to all ranks (`State.sync`). Call collectives only
    in ``func``, and not before it. A call of ``func`` ends by:

    - a lost rank (`hvd.CommunicationError`, or a `HorovodInternalError` that the program raises): the state is restored
      to its last commit. If the same ranks fail three times without a commit in between, the error is raised;
    - `HostsUpdatedInterrupt`, from `State.commit` or `State.check_host_updates`: the state is kept as it is;
    - a `StateLostError`, if all ranks are lost that had the state: those that were to get it cannot begin anew;
    - any other exception, which is raised: a mismatch between ranks, or a wrong shape, would come again.

    In the first two cases `hvd.shutdown` and `hvd.init` are called, then the reset callbacks, then ``func`` again.
    Returns what ``func`` returns. A worker that was removed from the job ends in that `hvd.init`, with exit code 0
    (`WorkerRemovedError`).

    In a job that is not elastic (``hvdlite-run`` without ``--min-np``, torchrun) the error of a lost rank is raised.
    """
    return run_fn(func, enter_again)


def run_fn(func: Callable[..., Result], reset: Callable[[], None]) -> Callable[..., Result]:
    """Does the same as `run`, with your own ``reset``, which must call `hvd.shutdown` and `hvd.init`."""

    @functools.wraps(func)
    def call(state: State, *args: Any, **kwargs: Any) -> Result:
        note_elastic_program()
        needs_sync = True
        # A new worker has made what it needs now, and becomes a rank.
        is_reset = current_world().stands_by
        if is_reset:
            point("join")
            reset()
        retry, commits = Retry(_TRIES), -1
        while True:
            try:
                # Before `listening`, which reports each change of hosts only once.
                state.forget_news()
                with listening(state):
                    if is_reset:
                        state.on_reset()
                    # A rank may be lost when some ranks have got a `HostsUpdatedInterrupt`, and others have not yet.
                    if _must_sync(needs_sync):
                        state.sync()
                        note_state()
                    state._here = None
                    tell_of_elastic_program()
                    return func(state, *args, **kwargs)
            except HvdliteError as error:
                assignment = current_world().assignment if _is_recoverable(error) else None
                if state._commits != commits:
                    commits = state._commits
                    retry.begin_anew()
                if assignment is None or not retry.failed(assignment.size, assignment.newcomers):
                    raise
                if state._is_in_commit:
                    log.warning("elastic: going back to this commit, which loses nothing, since %s", error)
                else:
                    log.warning("elastic: going back to the last commit, since %s", error)
                state.restore()
                state._is_in_commit = False
                needs_sync = True
            except HostsUpdatedInterrupt as interrupt:
                log.info("elastic: %s", interrupt)
                state._is_in_commit = False
                if (assignment := current_world().assignment) is not None:
                    state._note_kept(assignment.generation)
                needs_sync = not interrupt.skip_sync
            reset()
            is_reset = True
            survival = current_world().survival
            if survival is not None and survival.must_restore:
                state.restore()
                needs_sync = True

    return call


def _is_recoverable(error: HvdliteError) -> bool:
    # Programs raise Horovod's HorovodInternalError themselves, which is this very class.
    is_of_a_lost_rank = isinstance(error, CommunicationError) or type(error) is HvdliteError
    return is_of_a_lost_rank and is_initialized() and current_world().assignment is not None


def _must_sync(needs_sync: bool) -> bool:
    """Whether ``needs_sync`` is true on any rank. Every rank must call it, and waits for all.

    Raises a StateLostError on all ranks if none has the state of the training, since whoever was to send it was lost.
    If only rank 0 has none, it raises that error, and the others one after which they go on without rank 0.
    """
    world = current_world()
    if world.assignment is None:
        return needs_sync
    is_first = world.topology.rank == 0
    own = torch.tensor([needs_sync, has_state(), has_state() and is_first], dtype=torch.int64, device="cpu")
    any_needs_sync, any_has_state, first_has_state = allreduce(own, op=Max, name="hvd.elastic.run").tolist()
    if not any_has_state:
        # What the program has made would begin the training anew, and overwrite its checkpoints.
        raise StateLostError(
            "no rank is left that has the state of the training: start the job again, from a checkpoint if the "
            "program has saved one"
        )
    if not first_has_state:
        if is_first:
            raise StateLostError(
                "this rank has not got the state of the training, since the rank that sent it was lost: others have "
                "it, and go on without this rank"
            )
        raise CommunicationError("rank 0 has not got the state of the training, and ends")
    return bool(any_needs_sync)


keep_outside_graphs(globals())
