"""
`State` and `ObjectState`: the state that all ranks of an elastic program share, its last commit, and changes of hosts.

    commit ── save ── check_host_updates ── rank 0 tells all ranks which hosts have changed ── HostsUpdatedInterrupt

Names and behaviour are those of `horovod.common.elastic`: programs derive classes from these. There are two
differences: `ObjectState.sync` sends the current attributes, and not the saved ones; and `save` copies them.
"""

from __future__ import annotations

import copy
import enum
import queue
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import words_of
from ..faults import point
from ..log import log
from ..outside_graphs import keep_outside_graphs


class HostUpdates(enum.IntFlag):
    """How the hosts have changed since the last check. The numbers are those of Horovod's `HostUpdateResult`."""

    NONE = 0
    REMOVED = 1
    ADDED = 2
    MIXED = 3


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # Horovod's name
    """Raised by `State.commit` and `State.check_host_updates` on every rank when hosts were added or removed.

    ``skip_sync``: hosts were only removed, so the remaining ranks already have equal states.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have been removed" if skip_sync else "hosts have been added, or added and removed")
        self.skip_sync = skip_sync


# The first item of `State._here` where the state is that of a save.
SAVED = "saved"

Broadcast = Callable[[Any], Any]
"""Gives every rank the object of rank 0."""


class State:
    """Base class for state that is kept equal on all ranks of an elastic program.

    Derived classes define `save`, `restore` and `sync`, and may define `reset`.
    """

    # How many states have been saved, equal on all ranks, from the first `sync` on. Here, since derived classes may not
    # call the constructor.
    _saves: int | None = None
    # Between two calls of the function: which state this is, in words that are equal on ranks with equal states.
    _here: list[Any] | None = None
    # Whether `commit` has saved, and has not returned.
    _is_in_commit = False

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int]) -> None:
        """``bcast_object`` gives every rank the object of rank 0; ``get_rank`` says which rank this is now."""
        self._bcast_object = bcast_object
        self._rank = get_rank
        # These three are Horovod's: programs reach for them.
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0  # how often `commit` has saved

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these functions, in this order, after the ranks have changed and before the state is sent.

        For example, to scale a learning rate by `hvd.size`.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the callbacks. `run` calls this when the ranks have changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def _give_up_step(self) -> None:
        """Note that the step which is being taken begins again in the world that there is now."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts have changed, for the next `check_host_updates`. May be called from any thread.

        ``timestamp`` says when, in seconds; ``update_res`` how, as `HostUpdates`.
        """
        self._host_messages.put((timestamp, update_res))

    def forget_news(self) -> None:
        """Forget what `on_hosts_updated` has noted in an earlier world."""
        self._host_messages = queue.Queue()

    def commit(self) -> None:
        """Save, and `check_host_updates`. Every rank must call it, and waits for rank 0.

        When a rank is lost, `restore` goes back to what was saved. A commit takes as long as copying the state. With
        parameters on GPUs it first waits until the steps so far have ended on all ranks.
        """
        point("commit")
        self._require_ended()
        self.save()
        self._commits += 1
        self._note_saved()
        # If it raises, this is still the state that was saved.
        self._is_in_commit = True
        self.check_host_updates()
        self._here, self._is_in_commit = None, False

    def _require_ended(self) -> None:
        """Waits for the steps whose results `commit` saves, or raises their error; does nothing unless overridden."""

    def _note_saved(self) -> None:
        self._here = None if self._saves is None else [SAVED, self._saves]

    def _note_kept(self, generation: int) -> None:
        """Notes that all ranks of a generation have left the function at the same point, with the state as it was."""
        if self._here is None and self._saves is not None:
            self._here = ["kept", generation, self._saves]

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on every rank if rank 0 knows of hosts that were added or removed.

        Every rank must call it, and waits for rank 0.
        """
        told_at = changed_at = self._last_updated_timestamp
        updates = HostUpdates.NONE
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get_nowait()
            if timestamp > changed_at:
                changed_at = timestamp
                updates |= HostUpdates(update)
        # What rank 0 knows. Plain values, since programs pass a broadcast of their own.
        told_at, changed_at, updates = self._bcast_object((told_at, changed_at, int(updates)))
        self._last_updated_timestamp = changed_at
        if changed_at > told_at:
            raise HostsUpdatedInterrupt(skip_sync=updates == HostUpdates.REMOVED)

    def save(self) -> None:
        """Save the current state."""
        raise NotImplementedError(f"{type(self).__name__}.save")

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError(f"{type(self).__name__}.restore")

    def sync(self) -> None:
        """Make the state of every rank that of rank 0, and save it. Every rank must call it."""
        raise NotImplementedError(f"{type(self).__name__}.sync")

    def reset(self) -> None:
        """Adapt what depends on rank and size to the new world. Does nothing unless it is overridden."""


class ObjectState(State):
    """Keeps attributes equal on all ranks: ``ObjectState(bcast_object, get_rank, epoch=0, batch=0)``.

    Each is a picklable value that `copy.deepcopy` can copy. Attributes that are set later under other names are neither
    saved nor sent; a warning says so once for each.
    """

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state: dict[str, Any] = dict(kwargs)
        self._strangers: set[str] = set()
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            setattr(self, name, value)
        # Here, so that a value that cannot be copied is an error of the constructor.
        ObjectState.save(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not self._is_known(name) and name not in self._strangers:
            self._strangers.add(name)
            log.warning(
                "%s.%s is set and was not given when the state was made: it is neither saved, restored nor sent to "
                "other ranks; make the state with %s=...",
                *(type(self).__name__, name, name),
            )
        super().__setattr__(name, value)

    def _is_known(self, name: str) -> bool:
        return name in self._saved_state or hasattr(type(self), name)

    def save(self) -> None:
        """Save copies of the current attributes."""
        if self._saves is not None:
            self._saves += 1
        self._saved_state = {name: self._copy(name, getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Give the attributes the values that were saved last."""
        for name, value in self._saved_state.items():
            setattr(self, name, self._copy(name, value))
        self._note_saved()

    def sync(self) -> None:
        """Give the attributes of every rank the values that rank 0's have now, and save them.

        Every rank must call it, and waits for rank 0. A TypeError names an attribute that cannot be pickled.
        """
        if not self._saved_state:
            return
        values = {name: getattr(self, name) for name in self._saved_state}
        try:
            values = self._bcast_object(values)
        except TypeError as error:
            names = ", ".join(values)
            raise TypeError(
                f"{type(self).__name__}({names}): an attribute cannot be sent to other ranks: {error}"
            ) from error
        for name, value in values.items():
            setattr(self, name, value)
        ObjectState.save(self)

    def _copy(self, name: str, value: Any) -> Any:
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise TypeError(
                f"{type(self).__name__}({name}=...) cannot be saved: copying a {type(value).__name__} failed with "
                f"{type(error).__name__}: {words_of(error)}. Keep what can be copied in the state, and make the rest "
                "anew"
            ) from error


keep_outside_graphs(globals())
