"""
`run`: calls a training function again each time the ranks have changed, with its state restored or kept.

Meanwhile a thread hears of changed hosts, and ends the world's waits with its generation.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from hvdlite_wire.job_contract import STORE

from ..comm.reduce_op import Max
from ..errors import CommunicationError, HvdliteError, StateLostError
from ..faults import point
from ..log import log
from ..ops.api import allreduce
from ..outside_graphs import keep_outside_graphs
from ..rendezvous.elastic_store import KeyListener
from ..rendezvous.store_client import StoreClient
from ..runtime.survival import Retry
from ..runtime.world import (
    current_world,
    enter_again,
    has_state,
    is_initialized,
    note_elastic_program,
    note_state,
    revoke,
    tell_of_elastic_program,
)
from .state import HostsUpdatedInterrupt, HostUpdates, State


@contextlib.contextmanager
def listening(state: State) -> Iterator[None]:
    """A context in which ``state`` is told of changed hosts, and the world's waits fail once its generation has ended.

    Where the ranks survive the loss of others, it listens anew in the world of those that are left. Does nothing unless
    this process is a worker of an elastic job.
    """
    world = current_world()
    if world.assignment is None:
        yield
        return
    listener = _listen(state)

    def hear_the_next(newcomers: int) -> None:
        nonlocal listener
        listener.close()
        state.forget_news()
        listener = _listen(state)
        if newcomers:
            # They need the state as it is now: the step of which the averages are missing is begun again with them.
            state._give_up_step()
            raise HostsUpdatedInterrupt
        state.on_reset()

    try:
        if world.survival is None:
            yield
        else:
            with world.survival.calling(hear_the_next):
                yield
    finally:
        listener.close()


def _listen(state: State) -> KeyListener:
    world = current_world()
    assert world.assignment is not None, "it is an elastic job"

    def tell(value: bytes) -> None:
        news = json.loads(value)
        updates = HostUpdates.ADDED if news["added"] else HostUpdates.NONE
        updates |= HostUpdates.REMOVED if news["removed"] else HostUpdates.NONE
        state.on_hosts_updated(news["timestamp"], int(updates))

    return KeyListener(
        StoreClient.from_url(os.environ.get(STORE, "")),
        # The other ranks wait for a key that is never set, until it is revoked.
        f"{world.assignment.prefix}/{'hosts' if world.topology.rank == 0 else 'end'}",
        tell,
        partial(revoke, world.assignment.generation),
    )


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
