"""
Checks that all ranks train the same model: compares a fingerprint of every parameter before a step.

    parameters ── 64 bits of each chunk, on its device ── one read ── a digest ── its maximum and minimum over the ranks
               ── equal: done ── different: all-gather of the fingerprints ── MismatchError

It finds a forgotten broadcast. It compares the bits of the parameters that an optimizer has, including frozen ones, but
not a model's buffers, nor the optimizer's state. `in_flight` and `adasum_step` call it, at the same point of a step on
all ranks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor, nn

from ..calls.mismatch import name_ranks
from ..comm.flat_bytes import as_bytes
from ..comm.group import Group
from ..comm.reduce_op import Max
from ..comm.work import Work
from ..environment import CheckParameters
from ..errors import MismatchError
from ..log import log
from ..ops.sendable import is_sendable, plain_tensor
from ..signing import digest
from .plan import is_dense

# Words of 8 bytes that are hashed at once: few enough for a processor's cache.
_CHUNK_WORDS = 1 << 16
_WORD_BYTES = 8
# Odd constants as signed 64-bit numbers: the two of MurmurHash3's finalizer, and the golden ratio's for positions.
_FIRST, _SECOND, _PLACES = -49064778989728563, -4265267296055464877, -7046029254386353131
_LEAST = -(1 << 63)
_WHAT = "comparing the parameters"


class ParameterCheck:
    """Compares the parameters of one optimizer over the ranks of a group, in steps in which that is due.

    In each step all ranks call `begin`, `send` and `finish`, in this order.
    """

    def __init__(self, ranks: Group, when: CheckParameters, *, spares_first: bool = False) -> None:
        """``when``: True for the first step only, N for the first step and every N-th after it, False for none.

        With "warn", a difference at the first step is a warning of one rank, and no error.
        ``spares_first``: each comparison is a step later. Equal on all ranks.
        """
        self._is_on = when is not False and ranks.size > 1
        self._first = int(spares_first)
        self._only_warns = when == "warn"
        self._every = 0 if isinstance(when, bool | str) else when
        self._params: list[tuple[str, Tensor]] = []
        # The number of steps before the next comparison; None if none is due any more.
        self._steps_left: int | None = None
        # In a step with a comparison: the fingerprint of each parameter, the all-reduce, and its tensor.
        self._own: list[str] = []
        self._work: Work | None = None
        self._extremes: Tensor | None = None

    def add(self, params: Iterable[tuple[str, Tensor]]) -> None:
        """Adds parameters, and makes a comparison of all of them due. Every rank must call it."""
        self._params += params
        if self._is_on and self._params:
            self._steps_left = self._first

    def drop(self, names: Container[str]) -> None:
        """Leaves these parameters out from the next comparison on. Every rank must call it."""
        self._params = [(name, param) for name, param in self._params if name not in names]

    def begin(self, *, takes_part: bool) -> None:
        """Computes the fingerprints if a comparison is due, before the step changes parameters."""
        # An all-reduce is left over if the last step failed on this rank, and not on the others, after `send`.
        self._await()
        if self._steps_left != 0:
            if self._steps_left is not None:
                self._steps_left -= 1
            return
        self._extremes = torch.tensor([_LEAST, _LEAST], device="cpu", dtype=torch.int64)
        self._own = []
        if takes_part:
            self._own = fingerprints([param for _, param in self._params])
            mine = int.from_bytes(digest(repr(self._own).encode())[:_WORD_BYTES], "big", signed=True)
            # The maximum of the complements is the complement of the minimum.
            self._extremes = torch.tensor([mine, ~mine], device="cpu", dtype=torch.int64)

    def send(self, group: Group) -> None:
        if self._extremes is not None and self._work is None:
            self._work = group.all_reduce(self._extremes, _WHAT, Max)

    def finish(self, group: Group) -> None:
        """Waits for a comparison. Raises MismatchError on every rank if parameters differ, or warns."""
        if self._await():
            return
        difference = self._words(group, group.all_gather_json(self._own, _WHAT))
        if not self._only_warns:
            raise MismatchError(difference)
        self._is_on, self._steps_left = False, None
        if group.rank == 0:
            log.warning("%s. Training goes on with what each rank has, as with Horovod; this is shown once", difference)

    def _await(self) -> bool:
        """Waits for the comparison, if one was sent. Returns False if parameters differ, and leaves it due again."""
        work, self._work = self._work, None
        extremes, self._extremes = self._extremes, None
        if work is None or extremes is None:
            return True
        work.wait()
        highest, lowest = extremes.tolist()
        if highest == lowest == _LEAST:
            # All ranks have sat out.
            return True
        if highest != ~lowest:
            return False
        self._steps_left = self._every - 1 if self._every else None
        return True

    def _words(self, group: Group, of_all_ranks: Sequence[Sequence[str]]) -> str:
        """Returns the error message, from the fingerprints of all ranks. A rank that sits out has an empty list."""
        first = next(group_rank for group_rank, prints in enumerate(of_all_ranks) if prints)
        others = [
            group_rank for group_rank, prints in enumerate(of_all_ranks) if prints and prints != of_all_ranks[first]
        ]
        differing = [
            name
            for number, (name, _) in enumerate(self._params)
            if any(of_all_ranks[group_rank][number] != of_all_ranks[first][number] for group_rank in others)
        ]
        ranks = name_ranks([group.ranks[other] for other in others], dict(zip(group.ranks, group.hosts, strict=True)))
        of_set = "" if group.set_id == 0 else ", process_set=..."
        return (
            f"parameter {differing[0]!r} has different values on {ranks} than on {group.describe_rank(first)} "
            f"({len(differing)} of {len(self._params)} parameters differ): the ranks would train different models. "
            "Before the first step, and after loading a checkpoint on one rank, call "
            f"hvd.broadcast_parameters(model.state_dict(), root_rank={group.ranks[first]}{of_set}) on every rank. If "
            "the parameters should differ, use hvd.init(check_parameters=False), or a process set of the ranks that "
            "share them"
        )


@torch.no_grad()
def fingerprints(params: Sequence[Tensor]) -> list[str]:
    """Returns for each tensor a hash of its dtype, shape and elements, as hexadecimal text. Waits once per device.

    Elements are hashed in memory order if the memory has no gaps, else in the tensor's logical order.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    counts: list[tuple[torch.device, int]] = []
    scratches: dict[torch.device, _Scratch] = {}
    for param in params:
        if not is_sendable(param):
            counts.append((param.device, 0))
            continue
        device = param.device
        if device not in scratches:
            scratches[device] = _Scratch(device)
        of_chunks = [scratches[device].hash_of(chunk) for chunk in _chunks_of(plain_tensor(param))]
        sums.setdefault(device, []).extend(of_chunks)
        counts.append((device, len(of_chunks)))
    read = {device: iter(torch.stack(each).tolist()) for device, each in sums.items() if each}
    texts = []
    for param, (device, count) in zip(params, counts, strict=True):
        bits = [next(read[device]) for _ in range(count)]
        shape = None if nn.parameter.is_lazy(param) else tuple(param.shape)
        texts.append(digest(repr((param.dtype, shape, bits)).encode()).hex()[: 2 * _WORD_BYTES])
    return texts


def _chunks_of(tensor: Tensor) -> Iterable[Tensor]:
    """Yields the tensor's memory as 64-bit words, one chunk at a time. The last word is padded with zeros."""
    data = as_bytes(tensor if is_dense(tuple(tensor.shape), tensor.stride()) else tensor.contiguous())
    for start in range(0, data.numel(), _CHUNK_WORDS * _WORD_BYTES):
        chunk = data[start : start + _CHUNK_WORDS * _WORD_BYTES]
        missing = -chunk.numel() % _WORD_BYTES
        if missing:
            yield nn.functional.pad(chunk, (0, missing)).view(torch.int64)
        else:
            # A view as int64 must begin at a multiple of 8 bytes.
            yield (chunk.clone() if chunk.storage_offset() % _WORD_BYTES else chunk).view(torch.int64)


class _Scratch:
    """Hashes chunks on one device, in memory that is used for all of them: fresh pages would cost more than hashing."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.arange(1, _CHUNK_WORDS + 1, device=device, dtype=torch.int64)
        self._shifted = torch.empty_like(self._words)
        self._keys = self._mix(self._words.mul_(_PLACES)).clone()

    def hash_of(self, chunk: Tensor) -> Tensor:
        words = torch.add(chunk, self._keys[: chunk.numel()], out=self._words[: chunk.numel()])
        return self._mix(words).sum()

    def _mix(self, words: Tensor) -> Tensor:
        """Hashes each word, in place, so that every bit depends on all of its bits. Products wrap around."""
        shifted = self._shifted[: words.numel()]
        words.mul_(_FIRST).bitwise_xor_(torch.bitwise_right_shift(words, 32, out=shifted))
        words.mul_(_SECOND).bitwise_xor_(torch.bitwise_right_shift(words, 29, out=shifted))
        return words
