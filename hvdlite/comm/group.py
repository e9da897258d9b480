"""
`Group`: a communicator among some ranks, with the collectives that `ops` and `optim` are built on.

Each collective starts an operation on the group's engine, and returns a `Work` or waits for it. Errors of the engine
are raised as hvdlite's own, with the rank, the host and the collective's name.
"""

from __future__ import annotations

import ctypes
import functools
import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from ..errors import (
    LOOK_THERE,
    UNKNOWN_END,
    CommunicationError,
    PeerLostError,
    WrongTypeError,
    describe_end,
    says_peer_lost,
)
from ..signing import TAG_BYTES, Signer, digest
from ..values import shown, whole_number
from .engine import Done, Engine, EngineFactory, EngineWork, HasMemory, PeerGoneError, RevokedError, SingleRankFactory
from .flat_bytes import as_bytes, pieces_of
from .reduce_op import OP_OF_ENGINE, Average, ReduceOp, Sum
from .work import CollectiveWatch, Ends, Work

MAX_JSON_BYTES = 64 << 20
"""The most bytes of JSON that one rank may give to `Group.all_gather_json`."""

_LENGTH_BYTES = 8
_HEADER_BYTES = _LENGTH_BYTES + 2 * TAG_BYTES


class Group:
    """Ranks that call the same collectives in the same order.

    All ranks of the group must call every method that communicates. The methods that return a `Work` return at once,
    and the others wait for all ranks.
    """

    def __init__(
        self,
        engine_factory: EngineFactory,
        rank: int,
        size: int,
        hosts: Sequence[str],
        *,
        signer: Signer,
        watch: CollectiveWatch | None = None,
        set_id: int = 0,
        ranks: Sequence[int] | None = None,
        label: str = "all",
    ) -> None:
        """``rank`` and the order of ``hosts`` are within this group; ``ranks`` are the global ranks, by default all.

        ``signer`` has a key that only these ranks share. ``watch`` records the collectives of this group and of every
        group made from it; by default it is a new one. ``set_id`` is the number of the process set, 0 for all ranks.
        ``label`` is equal on all ranks of the group, and different for every group.
        """
        self.label = label
        self.signer = signer
        self._signed_count = 0
        self._duplicate_count = 0
        self._engine_factory = engine_factory
        # None once this rank has closed the group.
        self._engine: Engine | None = engine_factory.open()
        # The open duplicates. Not weak references, which the garbage collector may clear at any time.
        self._duplicates: set[Group] = set()
        self._duplicate_of: Group | None = None
        self._closing = threading.RLock()
        self.rank = rank
        self.size = size
        self.hosts = tuple(hosts)
        self.set_id = set_id
        self.ranks = tuple(range(size)) if ranks is None else tuple(ranks)
        self._watch = CollectiveWatch() if watch is None else watch

    def duplicate(self) -> Group:
        """Returns a group of the same ranks over an engine of its own, as MPI's Comm_dup. Every rank must call it.

        Code that starts collectives at times that may differ by rank, as a `Reducer` does, needs an engine that nothing
        else uses, since they pair up by their order within an engine.
        """
        self._duplicate_count += 1
        signer = self.signer.derive("duplicate", self._duplicate_count)
        label = f"{self.label}.{self._duplicate_count}"
        return _owned(self, _made_of(self, range(self.size), self._engine_factory, signer, self.set_id, label))

    def among(self, ranks: Sequence[int], *, set_id: int, token: str) -> Group:
        """Returns a group of some of the ranks, this one included, over engines of their own. Only these ranks call it.

        ``token`` is their prefix in the store: equal on these ranks, and never used before.
        """
        group_ranks = [self.ranks.index(rank) for rank in ranks]
        engine_factory = self._engine_factory.among(group_ranks, group_ranks.index(self.rank), token)
        return _made_of(self, group_ranks, engine_factory, self.signer.derive("among", token), set_id, token)

    def part(self, group_ranks: Sequence[int], *, token: str) -> Group:
        """Like `among`, but by ranks within this group; closing this group closes the part, too."""
        ranks = [self.ranks[group_rank] for group_rank in group_ranks]
        return _owned(self, self.among(ranks, set_id=self.set_id, token=token))

    def change_engines(self, engine_factory: EngineFactory, engine: Engine) -> None:
        """Use ``engine`` (of the same ranks) from now on, and open further engines with ``engine_factory``."""
        self._engine_factory, self._engine = engine_factory, engine

    def alone(self) -> Group:
        return _made_of(self, [self.rank], SingleRankFactory(), self.signer.derive("alone", self.rank), 0, "alone")

    def close(self) -> None:
        """Close the group's engine and its duplicates. It does not block."""
        for duplicate in list(self._duplicates):
            duplicate.close()
        # If two threads close at once, one closes the engine, and the other waits for it. No reference to an engine may
        # outlive this: gloo aborts if the interpreter ends before gloo's threads.
        with self._closing:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
            del engine
        if self._duplicate_of is not None:
            self._duplicate_of._duplicates.discard(self)

    def revoke(self, reason: str) -> None:
        """Make every wait in this group and its duplicates, now and later, raise a LostError; see `Engine.revoke`."""
        if (engine := self._engine) is not None:
            engine.revoke(reason)
        for duplicate in list(self._duplicates):
            duplicate.revoke(reason)

    def quiesce(self, reason: str) -> None:
        """Refuse new collectives with a RevokedError, and wait until those in progress have ended; so the duplicates.

        These end once the other ranks have begun them, too, or once the group is revoked.
        """
        if (engine := self._engine) is not None:
            engine.quiesce(reason)
        for duplicate in list(self._duplicates):
            duplicate.quiesce(reason)

    def require_ended(self, what: str) -> None:
        """Block until the collectives of GPU tensors have ended, here and in the duplicates, or raise an error."""
        engine = self.require_open(what)
        try:
            engine.require_ended()
        except RuntimeError as error:
            raise self.error_of(what, error) from error
        for duplicate in list(self._duplicates):
            duplicate.require_ended(what)

    @property
    def ends(self) -> Ends:
        """What ends waits for ranks that cannot come any more."""
        return self._watch.ends

    @property
    def is_closed(self) -> bool:
        return self._engine is None

    @property
    def engine(self) -> Engine:
        """The group's engine; a CommunicationError if the group is closed."""
        return self.require_open("a collective")

    def require_open(self, what: str) -> Engine:
        """Returns the engine, or raises a CommunicationError that names ``what`` if the group is closed."""
        engine = self._engine
        if engine is None:
            raise CommunicationError(
                f"{_failed(self, what)}: hvd.shutdown(), hvd.remove_process_set() or the optimizer's close() was "
                "called before: call hvd.init() again after a shutdown, else make a new optimizer"
            )
        return engine

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a flat tensor of zeros to be sent often, in the engine's memory if it has some. It does not block."""
        if device.type == "cpu" and isinstance(engine := self._engine, HasMemory):
            memory = engine.zeros(numel, dtype)
            if memory is not None:
                return memory
        return torch.zeros(numel, dtype=dtype, device=device)

    def describe_rank(self, rank: int) -> str:
        """Returns the global number and the host of a rank of the group, such as ``rank 3 (node2)``."""
        return f"rank {self.ranks[rank]} ({self.hosts[rank]})"

    def error_of(self, what: str, error: BaseException) -> CommunicationError:
        """Converts an engine's error to hvdlite's own."""
        where = _failed(self, what)
        if isinstance(error, RevokedError):
            return type(error)(f"{where}: {error}")
        # Gloo says the second of what else was in progress, since it closes all connections then.
        if any(words in str(error).lower() for words in ("timed out", "application timeout")):
            return CommunicationError(
                f"{where} because another rank did not take part within the timeout: it hangs, or the ranks call "
                f"different collectives; if it is only slow, raise hvd.init(timeout_s=...). ({_first_line(error)})"
            )
        if isinstance(error, PeerGoneError) or says_peer_lost(error):
            return _error_of_end(self, where, error)
        return CommunicationError(f"{where}: {_first_line(error)}")

    def group_rank_of_root(self, root_rank: object, what: str) -> int:
        """Returns the rank in this group of a root given by its global rank; a ValueError if it is not a member."""
        root = whole_number(root_rank)
        if root not in self.ranks:
            if self.set_id == 0:
                members = f"the {self.size} ranks, 0 to {self.size - 1}"
            else:
                members = f"the ranks of the process set, {', '.join(map(str, self.ranks))}"
            kind = WrongTypeError if root is None else ValueError
            raise kind(f"{what}: root_rank={shown(root_rank)} is not one of {members}")
        return self.ranks.index(root)

    def watched(self, work: EngineWork, what: str) -> Work:
        """Returns ``work``, which every rank has begun in other groups of these ranks, as this group's ``what``."""

        def error_of(what: str, error: BaseException) -> CommunicationError:
            # An error of one of the other groups is complete.
            return error if isinstance(error, CommunicationError) else self.error_of(what, error)

        return self._begun(work, what, error_of)

    def _launch(self, what: str, begin: Callable[[Engine], EngineWork]) -> Work:
        engine = self._engine or self.require_open(what)
        try:
            work = begin(engine)
        except RuntimeError as error:
            raise self.error_of(what, error) from error
        return self._begun(work, what)

    def _begun(
        self,
        work: EngineWork,
        what: str,
        error_of: Callable[[str, BaseException], CommunicationError] | None = None,
    ) -> Work:
        # The counts let ranks report which collectives of others they have not begun.
        watch = self._watch
        number = watch.begun[self.label] = watch.begun.get(self.label, 0) + 1
        watch.beginners.add(threading.get_ident())
        collective = self.label, number, self.ranks
        return Work(work, what, watch, error_of or self.error_of, collective, self.describe_rank)

    def all_reduce(self, tensor: Tensor, what: str, op: ReduceOp = Sum) -> Work:
        """Reduce a contiguous tensor over all ranks, in place.

        All engines have Sum, Min, Max and Product of integers (not int16) and floats; those that `reduces_in_one_pass`
        also have Average of floats. `ops.reduction` builds the others.
        """
        # What `_launch` does, without its two calls: they would be a fiftieth of a small all-reduce in shared memory.
        engine = self._engine or self.require_open(what)
        try:
            work = engine.allreduce([tensor], _all_reduce_options(op))
        except RuntimeError as error:
            raise self.error_of(what, error) from error
        return self._begun(work, what)

    def all_reduce_into(self, output: Tensor, tensor: Tensor, what: str, op: ReduceOp = Sum) -> Work:
        """Like `all_reduce`, but leave ``tensor`` unchanged; only where the engine `reduces_in_one_pass`."""
        return self._launch(what, lambda engine: engine.allreduce_into(output, tensor, _all_reduce_options(op)))

    def reduces_in_one_pass(self, tensor: Tensor) -> bool:
        """Whether the engine has `all_reduce_into` and Average of floats for such a tensor; equal on all ranks."""
        return tensor.is_cpu and self._engine is not None and self._engine.reduces_in_one_pass

    def broadcast(self, tensor: Tensor, root_rank: int, what: str) -> Work:
        """Overwrite a contiguous tensor of any dtype (sent as bytes) with the tensor of group rank ``root_rank``."""
        options = dist.BroadcastOptions()
        options.rootRank = root_rank
        options.rootTensor = 0
        return self._launch(what, lambda engine: engine.broadcast([as_bytes(tensor)], options))

    def all_gather(self, tensor: Tensor, what: str, counts: Sequence[int] | None = None) -> list[Tensor]:
        """Returns the flat bytes of every rank's contiguous tensor, in rank order.

        ``counts`` are their sizes in bytes, which may differ. Without them the ranks exchange these first.
        """
        if counts is None:
            own_size = torch.tensor([tensor.nbytes], dtype=torch.int64, device="cpu")
            sizes = self.all_gather(own_size, what, [own_size.nbytes] * self.size)
            counts = [int(size.view(torch.int64).item()) for size in sizes]
        parts, work = self.begin_all_gather(tensor, what, counts)
        work.wait()
        return parts

    def begin_all_gather(self, tensor: Tensor, what: str, counts: Sequence[int]) -> tuple[list[Tensor], Work]:
        """Begin what `all_gather` does; the bytes are valid once the work is done.

        ``counts`` are equal on all ranks. The tensors are padded to the longest.
        """
        mine, longest = as_bytes(tensor), max(counts)
        if longest == 0:
            return [mine.new_empty(0) for _ in counts], Work(Done(), what, self._watch, self.error_of)
        padded = mine
        if mine.numel() < longest:
            padded = mine.new_zeros(longest)
            padded[: mine.numel()].copy_(mine)
        gathered = [torch.empty_like(padded) for _ in counts]
        work = self._launch(what, lambda engine: engine.allgather([gathered], [padded]))
        return [part[:count] for part, count in zip(gathered, counts, strict=True)], work

    def begin_all_gather_of_parts(
        self, flat: Tensor, counts: Sequence[int], into: Sequence[tuple[int, Tensor]], what: str
    ) -> Callable[[], None]:
        """Begin to copy what is wanted of other ranks' parts of a flat tensor; returns what waits until it is there.

        The arguments are as in `Engine.allgather_parts`. ``flat`` must not be changed until all ranks have waited.
        """
        if flat.is_cpu and self.engine.gathers_parts:
            return self._launch(what, lambda engine: engine.allgather_parts(flat, counts, into)).wait
        bounds = [0, *accumulate(counts)]
        own = flat[bounds[self.rank] : bounds[self.rank + 1]]
        parts, work = self.begin_all_gather(own, what, [count * flat.element_size() for count in counts])

        def finish() -> None:
            work.wait()
            for start, tensor in into:
                place = bisect_right(bounds, start) - 1
                offset = start - bounds[place]
                tensor.copy_(parts[place].view(flat.dtype)[offset : offset + tensor.numel()])

        return finish

    def begin_all_to_all(
        self,
        tensor: Tensor,
        sent_bytes: Sequence[int],
        received_bytes: Sequence[int],
        what: str,
        output: Tensor | None = None,
    ) -> tuple[list[Tensor], Work]:
        """Begin to send each rank its part of a flat tensor of bytes; returns the parts received, in rank order.

        These are valid once the work is done, in ``output`` if it is given. ``sent_bytes`` and ``received_bytes`` are
        the sizes of the parts sent to, and received from, each rank.
        """
        if output is None:
            output = tensor.new_empty(sum(received_bytes))
        into, received, sent = output, list(received_bytes), list(sent_bytes)
        work = self._launch(what, lambda engine: engine.alltoall_base(into, tensor, received, sent, AllToAllOptions()))
        return pieces_of(output, received_bytes), work

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, counts: Sequence[int], what: str, op: ReduceOp = Sum
    ) -> Work:
        """Reduce all ranks' parts for this rank of a flat tensor into ``output``.

        ``counts`` are the elements of each rank's part, equal on all ranks; dtypes and ops are as in `all_reduce`.
        """
        options = dist.ReduceScatterOptions()
        options.reduceOp = OP_OF_ENGINE[op]
        return self._launch(what, lambda engine: engine.reduce_scatter_base(output, tensor, list(counts), options))

    def all_gather_json(self, value: object, what: str) -> list[Any]:
        """Returns every rank's JSON value, in rank order, signed as in `all_gather_signed`; tuples arrive as lists."""
        data = json.dumps(value).encode()
        return [json.loads(each) for each in self.all_gather_signed(data, what, at_most_bytes=MAX_JSON_BYTES)]

    def all_gather_signed(self, data: bytes, what: str, *, at_most_bytes: int | None = None) -> list[bytes]:
        """Returns the bytes of every rank, in rank order, after checking that each rank sent its own in this very call.

        A CommunicationError names a rank whose bytes are not signed with the job's key, or are more than
        ``at_most_bytes``. Memory is allocated for a length only after its signature is checked.
        """
        call = self._signed_call(what)
        headers = self.all_gather(call.header(data, self.rank), what, [_HEADER_BYTES] * self.size)
        read = [call.read_header(header, group_rank) for group_rank, header in enumerate(headers)]
        for group_rank, (length, _) in enumerate(read):
            if at_most_bytes is not None and length > at_most_bytes:
                raise CommunicationError(
                    f"{_failed(self, what)}: {self.describe_rank(group_rank)} sends {length} bytes, more than the "
                    f"limit of {at_most_bytes}"
                )
        parts = self.all_gather(_tensor_of(data), what, [length for length, _ in read])
        return [call.checked(parts[rank], read[rank][1], rank) for rank in range(self.size)]

    def broadcast_signed(self, data: bytes | None, root: int, what: str) -> bytes:
        """Returns the bytes of rank ``root`` of this group, after checking that it sent them in this very call.

        The other ranks pass None.
        """
        call = self._signed_call(what)
        header = _tensor_of(bytes(_HEADER_BYTES)) if data is None else call.header(data, root)
        self.broadcast(header, root, what).wait()
        length, expected = call.read_header(header, root)
        wire = torch.empty(length, dtype=torch.uint8, device="cpu") if data is None else _tensor_of(data)
        if length:
            self.broadcast(wire, root, what).wait()
        return call.checked(wire, expected, root)

    def _signed_call(self, what: str) -> _SignedCall:
        self._signed_count += 1
        return _SignedCall(self, self._signed_count, what)

    def agree(self, value: object, what: str) -> list[Any] | None:
        """Returns None if every rank passed an equal value, else all values in rank order.

        The values are JSON, compared by their repr. The usual case, in which they agree, costs 32 bytes per rank.
        """
        own = digest(repr(value).encode())
        parts = self.all_gather(_tensor_of(own), what, [len(own)] * self.size)
        if all(torch.equal(part, parts[0]) for part in parts):
            return None
        return self.all_gather_json(value, what)


def _made_of(
    group: Group, group_ranks: Sequence[int], engine_factory: EngineFactory, signer: Signer, set_id: int, label: str
) -> Group:
    """Returns a group of some of the ranks, whose collectives are recorded with those of ``group``."""
    return Group(
        engine_factory,
        group_ranks.index(group.rank),
        len(group_ranks),
        [group.hosts[each] for each in group_ranks],
        signer=signer,
        watch=group._watch,
        set_id=set_id,
        ranks=[group.ranks[each] for each in group_ranks],
        label=label,
    )


def _owned(group: Group, made: Group) -> Group:
    """Returns ``made``, which is closed, revoked and quiesced with ``group``."""
    made._duplicate_of = group
    group._duplicates.add(made)
    return made


def _failed(group: Group, what: str) -> str:
    return f"{what} failed on {group.describe_rank(group.rank)}"


def _error_of_end(group: Group, where: str, error: BaseException) -> CommunicationError:
    seen = group.ranks[error.group_rank] if isinstance(error, PeerGoneError) else None
    rank, ended_normally = group._watch.first_end() or (seen, False)
    if rank is None or rank not in group.ranks:
        return PeerLostError(f"{where} because {UNKNOWN_END}: {LOOK_THERE}. ({_first_line(error)})")
    end = describe_end(group.describe_rank(group.ranks.index(rank)), ended_normally)
    if ended_normally:
        return CommunicationError(
            f"{where} because {end}: every rank must take the same number of steps and call the same collectives; "
            "for ranks with fewer batches see hvd.join(). If it called sys.exit(), look at its output. "
            f"({_first_line(error)})"
        )
    return PeerLostError(f"{where} because {end}: {LOOK_THERE}. ({_first_line(error)})")


@functools.cache
def _all_reduce_options(op: ReduceOp) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG) if op is Average else OP_OF_ENGINE[op]
    return options


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@dataclass
class _SignedCall:
    """One collective of signed data; ``number`` differs from that of every other call of the group.

    A header goes before the data: their length and digest, and a signature of both, the rank and the call.
    """

    group: Group
    number: int
    what: str

    def header(self, data: bytes, group_rank: int) -> Tensor:
        """Returns the header of this rank's data, of shape ``(_HEADER_BYTES,)`` and uint8."""
        length, own_digest = len(data), digest(data)
        tag = self.group.signer.sign(self.what, self.number, group_rank, length, own_digest)
        return _tensor_of(length.to_bytes(_LENGTH_BYTES, "big") + own_digest + tag)

    def read_header(self, received: Tensor, group_rank: int) -> tuple[int, bytes]:
        """Returns the length and digest in the header of rank ``group_rank``, after checking its signature."""
        header = bytes(received.tolist())
        length = int.from_bytes(header[:_LENGTH_BYTES], "big")
        its_digest, tag = header[_LENGTH_BYTES:-TAG_BYTES], header[-TAG_BYTES:]
        if not self.group.signer.is_signed(tag, self.what, self.number, group_rank, length, its_digest):
            raise self._forged(group_rank)
        return length, its_digest

    def checked(self, part: Tensor, expected: bytes, group_rank: int) -> bytes:
        """Returns the data of rank ``group_rank``, after comparing their digest with that of the header."""
        # Not with numpy, which torch does not require, nor with a Python int for each byte.
        data = ctypes.string_at(part.data_ptr(), part.numel()) if part.numel() else b""
        if digest(data) != expected:
            raise self._forged(group_rank)
        return data

    def _forged(self, group_rank: int) -> CommunicationError:
        return CommunicationError(
            f"{_failed(self.group, self.what)}: the data received from {self.group.describe_rank(group_rank)} are not "
            "signed with this job's key for this call: something on the network between the two has changed or "
            "replaced them"
        )


def _tensor_of(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
