"""
`Generation`: a rank's watch, recorder and registry of reducers from one `init` to its `shutdown`.

    runtime.world.World ── group, controller, process sets
                        └─ Generation ── watch, recorder, reducers ── passed to control, timeline, process sets, optim

This state exists once

    per process      stores and connections (`rendezvous.process_state`), and each optimizer's reducer
    per generation   the group of all ranks, the controller with its two threads, the watch, the recorder, the registry
                     of reducers, the table of process sets
    per group        an engine, a signer, a number for each collective
    per set          a group, an engine for operations, an order in which its optimizers are made
    per thread       what it waits for, which is an entry of the watch
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..comm.recorder import Recorder
from ..comm.work import CollectiveWatch
from .reducer_registry import ReducerRegistry


@dataclass(frozen=True, slots=True)
class Generation:
    """State that all groups of one world share on this rank.

    ``watch`` records every collective of all groups, and the ends of other ranks. ``recorder`` records events for a
    timeline. ``reducers`` are the objects that average gradients, by group.
    """

    watch: CollectiveWatch = field(default_factory=CollectiveWatch)
    recorder: Recorder = field(default_factory=Recorder)
    reducers: ReducerRegistry = field(default_factory=ReducerRegistry)
