"""
`Generation`: a rank's state from one `init` to its `shutdown`: the watch, the recorder and the reducers.

    runtime.world.World ── group, controller, process sets
                        └─ Generation ── watch, recorder, reducers ── handed to control, timeline, process sets, optim

There is one of each of these

    in a process      what outlives a world: `rendezvous.process_state` lists it
    in a generation   the group of all ranks, the controller with its two threads, the watch, the recorder, the registry
                      of reducers, the table of process sets
    for each group    an engine, a signer, a number for each collective
    for each set      a group, an engine for operations, an order in which its optimizers are made
    for each thread   what it waits for, which is an entry of the watch
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..comm.recorder import Recorder
from ..comm.work import Watch
from .reducer_registry import ReducerRegistry


@dataclass(frozen=True, slots=True)
class Generation:
    """What the groups of one world have in common on this rank.

    ``watch`` is told of every collective of all groups, and of other ranks' ends. ``recorder`` notes what happens when,
    for a timeline. ``reducers`` are those that average gradients, by group.
    """

    watch: Watch = field(default_factory=Watch)
    recorder: Recorder = field(default_factory=Recorder)
    reducers: ReducerRegistry = field(default_factory=ReducerRegistry)
