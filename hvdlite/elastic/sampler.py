"""
`ElasticSampler`: divides the samples that are left in an epoch among the current ranks.

    set_epoch, reset ── divide what is left ── iter ── record_batch ── a rank is lost in a step (--survive): go_on
                                                                   └─ the ranks change otherwise: reset

Its iterators have a state of their own, with which torchdata's `StatefulDataLoader` goes on in the middle of an epoch:
what they have drawn, of which the program may not have recorded all.

How the samples are divided, also where ranks are lost, is in `ledger`; `Survival` calls what is needed for the latter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from ..outside_graphs import keep_outside_graphs
from ..runtime.survival import Note
from ..runtime.world import current_world, is_initialized, note_samples, rank, size
from .ledger import Division, Ledger, Loss, Votes, from_plain, plain


class _Next(NamedTuple):
    """The division that ranks which are a step ahead have made, for this rank to make too."""

    place: list[int]
    member: int
    losses: list[Loss]


class _Discarded(NamedTuple):
    """The step that was discarded last, of which something may still be recorded; see `Loss`.

    ``stop``: the end of what is recorded of it. ``is_late``: the program records something after its step.
    """

    stop: int
    is_added: bool
    is_late: bool


class ElasticSampler(Sampler[int]):
    """Divides the indices of a dataset that are left in this epoch among the ranks.

    Like `torch.utils.data.DistributedSampler`, but when the ranks change in the middle of an epoch, samples that were
    processed are not drawn again: give it to `TorchState`, and call `record_batch` after each batch. The last samples
    are repeated so that every rank has equally many. Every rank must make it with the same arguments.

    With ``hvdlite-run --survive``, iterators go on when a rank is lost within a step: what that rank had left is added
    to what the others draw. If one of them has drawn its last sample already, a new iterator draws it, of this epoch or
    of the next.

    Call `set_epoch` at the *end* of an epoch, before the next begins. Behaves as Horovod's of that name.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """``shuffle`` draws another order in each epoch, from ``seed`` and the epoch's number."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.indices: list[int] = []
        self.num_samples = 0
        self.kind = f"{type(self).__name__}({len(dataset)}, {shuffle}, {seed})"
        self._ledger = Ledger()
        self._division = Division(1)
        self._member = 0
        self._next: _Next | None = None
        self._votes = Votes()
        # The last iterator of this division.
        self._iterator: _SamplerIterator | None = None
        # Whether the samples of a step that is discarded now are added to what is drawn in this iteration.
        self._may_add = False
        self._discarded: _Discarded | None = None
        self._divide()
        if is_initialized() and (survival := current_world().survival) is not None:
            survival.follow(self)

    @property
    def total_size(self) -> int:
        """How many samples all ranks together draw."""
        return self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: none of its samples has been processed."""
        carried = self._ledger.carried
        if self.processed_num or self._ledger.divisions or self._division.losses:
            carried = self._rest()
        self.epoch = epoch
        self.processed_num = 0
        self._ledger, self._division = Ledger(carried), Division(1)
        self._divide()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of ``batch_size``; ``batch_idx`` is Horovod's, and unused."""
        self._record(int(batch_size))

    def record_indices(self, indices: Sized) -> None:
        """Note that every rank has processed as many samples as these."""
        self._record(len(indices))

    def _record(self, count: int) -> None:
        self.processed_num += count * self.num_replicas
        self._division.processed += count
        discarded = self._discarded
        if discarded is not None and discarded.is_late:
            self._discarded = None
            self._discard(discarded.stop, count, is_added=discarded.is_added)
        note_samples(count)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of this rank's batch number ``batch_idx`` since the last call of `iter`."""
        start = batch_idx * batch_size
        return self.indices[start : start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many samples of it all ranks have processed, and after a loss within a step which."""
        return self._state_after(0)

    def _state_after(self, count: int) -> dict[str, Any]:
        processed_num = self.processed_num + count * self.num_replicas
        state: dict[str, Any] = {"epoch": self.epoch, "processed_num": processed_num}
        ledger = self._ledger
        if self._division.losses:
            division = replace(self._division, processed=self._division.processed + count)
            ledger = Ledger(ledger.carried, [*ledger.divisions, division], processed_num)
        if ledger.divisions or ledger.carried:
            state["ledger"] = plain(ledger)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken, with the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self._ledger = from_plain(Ledger, state_dict["ledger"]) if "ledger" in state_dict else Ledger()
        self._division = Division(1)
        self._next = None
        self._divide()

    def reset(self) -> None:
        """Divide what is left of the epoch among the ranks that there are now.

        Does nothing in the middle of a step: the ranks that are left keep what they had, and `go_on` adds the rest.
        """
        if is_initialized() and (survival := current_world().survival) is not None and survival.is_going_on:
            return
        self._next = None
        self._divide()

    def _divide(self) -> None:
        if self._division.losses:
            self._ledger.divisions.append(self._division)
            self._ledger.counted = self.processed_num
        self.num_replicas, self.rank = size(), rank()
        pool = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(pool)
        skipped = self.processed_num - self._ledger.counted
        self.remaining_indices = self._ledger.left(pool)[skipped:]
        self._division, self._member = Division(self.num_replicas, skipped), self.rank
        self._votes.begin()
        self._discarded = None
        self._iterator = None
        ahead, self._next = self._next, None
        if ahead is not None and ahead.place[:-1] == self._place[:-1]:
            self._division.size, self._member, self._division.losses = ahead.place[-1], ahead.member, ahead.losses
        self.num_samples = len(self._share())

    @property
    def _place(self) -> list[int]:
        """Which division of which epoch this is; the last number is that of its members."""
        return [self.epoch, len(self._ledger.divisions), self._division.skipped, self._division.size]

    def _share(self) -> list[int]:
        share = self._division.shares(self.remaining_indices)[0][self._member]
        return [index if index >= 0 else ~index for index in share]

    def _rest(self) -> list[int]:
        return self._division.shares(self.remaining_indices)[1] if self._division.losses else []

    def __iter__(self) -> Iterator[int]:
        """This rank's indices, from the epoch's remaining ones as `reset` has divided them.

        The iterator has ``state_dict`` and ``load_state_dict``, which `torchdata.stateful_dataloader` calls: a loader
        goes on behind the last batch that it has given, whether that was recorded or not, on any number of ranks. The
        state is equal on all ranks. After the last batch of an epoch the next loader begins the next epoch.
        """
        if self._iterator is not None and self._iterator.is_resumed_at_end:
            # The loader has ended an epoch: it leaves the iterator that it has given its state, and asks for this one.
            self.set_epoch(self.epoch + 1)
        if self._iterator is not None and self._rest():
            self._divide()
        self._iterator = _SamplerIterator(self)
        return self._iterator

    def __len__(self) -> int:
        """How many samples each rank has left in this epoch."""
        return self.num_samples

    # -- where a rank is lost within a step: called by `runtime.survival`

    def note_vote(self, number: int) -> None:
        """Notes that a step of the optimizer with this number has ended on this rank."""
        self._votes.note(number, self._division.processed)
        self._discard_late(self._votes.late(number))

    def _discard_late(self, late: int) -> None:
        """Discards what was recorded after the discarded step, once the next step shows it."""
        discarded, self._discarded = self._discarded, None
        if discarded is not None and late:
            self._discard(discarded.stop, late, is_added=False)

    def note_discarded(self, number: int) -> None:
        """Adds the samples of the step that is discarded to what is drawn later."""
        division = self._division
        is_trained = self._votes.another_ends(number, division.processed)
        trained = self._votes.trained(number, division.processed)
        recorded = division.processed - trained
        late = self._votes.late(number, division.processed)
        self.note_vote(number)
        if is_trained:
            return
        if recorded:
            self._discard(trained, recorded, is_added=self._may_add)
        self._discarded = _Discarded(trained + recorded, self._may_add, late > 0 or not recorded)

    def _discard(self, trained: int, count: int, *, is_added: bool) -> None:
        losses = self._division.losses
        # A rank that has come to the step before may have told this one.
        if not any(loss.discarded and loss.trained == trained for loss in losses):
            self._lose([*losses, Loss(trained, (), is_added, count)])

    def note_of(self, number: int | None) -> dict[str, Any]:
        """Returns what the other ranks must know to go on without those that are lost, as JSON's values."""
        if number is not None:
            self._discard_late(self._votes.late(number, self._division.processed))
        return {
            "place": self._place,
            "rank": self.rank,
            "member": self._member,
            "has_ended": self._iterator is not None and self._iterator.has_ended,
            "trained": self._votes.trained(number, self._division.processed),
            "losses": plain(self._division.losses),
        }

    def go_on(self, notes: Sequence[Note]) -> None:
        """Adds what the lost ranks had left to what the others draw; ``notes`` are what those say in `note_of`."""
        # Ranks that have ended the step may have begun the next epoch. The others follow them.
        most = max(note.passed for note in notes)
        ahead = [note.note for note in notes if note.passed == most]
        place = ahead[0]["place"]
        there = [note.note for note in notes if note.note["place"] == place]
        # A rank that was lost meanwhile may have kept some of them from hearing of an earlier loss.
        losses = max((from_plain(list[Loss], note["losses"]) for note in there), key=len)
        before = Division(place[-1], losses=losses)
        # A division's members are the ranks of the world in which it was made, which those behind are in, too.
        members = [note.note["member" if note.note["place"] == place else "rank"] for note in notes]
        is_added = not any(note["has_ended"] for note in there)
        # Ranks that come to the discarded step later may have drawn their last sample by then.
        self._may_add = is_added and all(note.passed == most for note in notes)
        if lost := tuple(member for member in before.members if member not in members):
            losses.append(Loss(min(note["trained"] for note in ahead), lost, is_added))
        self.num_replicas, self.rank = size(), rank()
        if place == self._place:
            self._lose(losses)
        else:
            self._next = _Next(place, members[self.rank], losses)

    def _lose(self, losses: list[Loss]) -> None:
        known, self._division.losses = len(self._division.losses), losses
        for number, loss in enumerate(losses[known:], known + 1):
            self.processed_num += (loss.trained - self._division.processed) * len(loss.lost)
            self.processed_num -= loss.discarded * len(Division(self._division.size, losses=losses[:number]).members)
        share = self._share()
        if self._iterator is not None:
            self.indices += share[len(self.indices) :]
        self.num_samples = len(share)

    def begin_again(self, number: int | None) -> None:
        """Forgets what was recorded of the step in which a rank is lost: it is given up."""
        division = self._division
        untrained = division.processed - self._votes.trained(number, division.processed)
        division.processed -= untrained
        self.processed_num -= untrained * self.num_replicas


class _SamplerIterator(Iterator[int]):
    """An iterator of an `ElasticSampler`, which adds to the list that this draws from where a rank is lost."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self.has_ended = False
        self.is_resumed_at_end = False
        """Whether it was given a state in which all samples of the epoch had been drawn."""
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        self._indices = self._sampler.indices = self._sampler._share()
        self._division = self._sampler._division
        self._drawn = 0

    def __next__(self) -> int:
        if not self.has_ended:
            if self._drawn < len(self._indices):
                self._drawn += 1
                return self._indices[self._drawn - 1]
            self.has_ended = True
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, as if all that was drawn had been recorded: a loader with workers draws ahead."""
        is_current = self._division is self._sampler._division
        return self._sampler._state_after(max(0, self._drawn - self._division.processed) if is_current else 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken, with the ranks that there are now."""
        self._sampler.load_state_dict(state_dict)
        self._begin()
        self._sampler._iterator = self
        self.is_resumed_at_end = not self._indices


keep_outside_graphs(globals())
