"""
Tells a `State`, during a training function, of changed hosts, and ends the world's waits with its generation.

`run` starts the listening thread after each init and ends it before the next shutdown. Where the ranks survive the loss
of others, it is started anew in the world of those that are left.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial

from hvdlite_wire.job_contract import STORE

from ..rendezvous.key_listener import KeyListener
from ..rendezvous.store_client import StoreClient
from ..runtime.world import current_world, revoke
from .state import HostsUpdatedInterrupt, HostUpdates, State


@contextlib.contextmanager
def listening(state: State) -> Iterator[None]:
    """A context in which ``state`` is told of changed hosts, and the world's waits fail once its generation has ended.

    Does nothing unless this process is a worker of an elastic job.
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
