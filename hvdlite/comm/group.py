"""
`Group`: a communicator among some ranks, with its collectives (all-reduce, broadcast, all-gather, all-to-all, ...).

    Group (rank, size, hosts) ── an operation on its engine ── Work (wait, or what went wrong)

Transport alone: who is in the group, its engine, and groups made of it. A group is handed to whoever communicates;
`runtime.world` knows which one is the whole job's. Errors of the engine leave here as hvdlite's own, with the rank,
the host and what was under way.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from ..errors import CommunicationError, PeerLostError, WrongTypeError, says_peer_lost
from ..signing import TAG_BYTES, Signer, digest
from ..values import shown, whole_number
from .engine import (
    ClosedEngine,
    Done,
    Engine,
    EngineFactory,
    EngineWork,
    HasMemory,
    OnePassEngine,
    PeerGoneError,
    SingleRankFactory,
)
from .engine_state import RevokedError
from .flat_bytes import as_bytes, pieces_of
from .reduce_op import OP_OF_ENGINE, Average, ReduceOp, Sum
from .work import Watch, Work

MAX_JSON_BYTES = 64 << 20
"""What one rank may tell the others of itself at most, as JSON."""

_LENGTH_BYTES = 8


class Group:
    """Ranks that call the same collectives in the same order.

    Every method must be called by all ranks of the group; those that return a `Work` return at once,
    the others wait for all ranks.
    """

    def __init__(
        self,
        engine_factory: EngineFactory,
        rank: int,
        size: int,
        hosts: Sequence[str],
        *,
        signer: Signer,
        watch: Watch | None = None,
        set_id: int = 0,
        ranks: Sequence[int] | None = None,
        label: str = "all",
    ) -> None:
        """``rank`` and ``hosts`` are by rank in this group; ``ranks`` are the global ranks, all if not given.

        ``signer`` has a key that these ranks have in common, and no other group. ``watch`` is told of every collective,
        as is that of all groups made of this one; one of its own if not given. ``set_id`` is the number of the process
        set that these ranks are, 0 of all. ``label`` is equal on all of them, and no other group's.
        """
        self.label = label
        self.signer = signer
        self._signed_count = 0
        self._duplicate_count = 0
        self._engine_factory = engine_factory
        self.engine: Engine = engine_factory.open()
        # Those that have not been closed. Not by weak references, which go when the collector comes.
        self._duplicates: set[Group] = set()
        self._duplicate_of: Group | None = None
        self._closing = threading.RLock()
        self.rank = rank
        self.size = size
        self.hosts = tuple(hosts)
        self.set_id = set_id
        self.ranks = tuple(range(size)) if ranks is None else tuple(ranks)
        self._watch = Watch() if watch is None else watch

    def duplicate(self) -> Group:
        """The same ranks over an engine of its own (as MPI's Comm_dup). Every rank must call it.

        Collectives pair up by their order within an engine alone. Whoever launches them at times that may
        differ by rank, as a `Reducer` does, needs one that nobody else uses.
        """
        self._duplicate_count += 1
        signer = self.signer.derive("duplicate", self._duplicate_count)
        group = Group(
            self._engine_factory,
            self.rank,
            self.size,
            self.hosts,
            signer=signer,
            watch=self._watch,
            set_id=self.set_id,
            ranks=self.ranks,
            label=f"{self.label}.{self._duplicate_count}",
        )
        group._duplicate_of = self
        self._duplicates.add(group)
        return group

    def among(self, ranks: Sequence[int], *, set_id: int, token: str) -> Group:
        """Some of the ranks, this one among them, over engines of their own. Only these ranks must call it.

        ``token`` names their meeting place: equal on these ranks, and never used before.
        """
        group_ranks = [self.ranks.index(rank) for rank in ranks]
        engine_factory = self._engine_factory.among(group_ranks, group_ranks.index(self.rank), token)
        hosts = [self.hosts[group_rank] for group_rank in group_ranks]
        signer = self.signer.derive("among", token)
        return Group(
            engine_factory,
            group_ranks.index(self.rank),
            len(group_ranks),
            hosts,
            signer=signer,
            watch=self._watch,
            set_id=set_id,
            ranks=ranks,
            label=token,
        )

    def part(self, group_ranks: Sequence[int], *, token: str) -> Group:
        """Like `among`, by their ranks in this group, for as long as this group is open: it is closed with it."""
        group = self.among([self.ranks[group_rank] for group_rank in group_ranks], set_id=self.set_id, token=token)
        group._duplicate_of = self
        self._duplicates.add(group)
        return group

    def change_engines(self, engine_factory: EngineFactory, engine: Engine) -> None:
        """From now on communicate over another engine of the same ranks, and open further ones where that is from."""
        self._engine_factory, self.engine = engine_factory, engine

    def alone(self) -> Group:
        """This rank by itself."""
        signer = self.signer.derive("alone", self.rank)
        ranks, hosts = [self.ranks[self.rank]], [self.hosts[self.rank]]
        return Group(SingleRankFactory(), 0, 1, hosts, signer=signer, watch=self._watch, ranks=ranks, label="alone")

    def close(self) -> None:
        """Give the engine back, and those of the duplicates. Waits for nobody.

        No reference to an engine may outlive this: gloo aborts if the interpreter goes before its threads.
        """
        for duplicate in list(self._duplicates):
            duplicate.close()
        # Of two threads that close, one closes the engine, and the other returns when that is done.
        with self._closing:
            engine, self.engine = self.engine, ClosedEngine()
            if not isinstance(engine, ClosedEngine):
                self._engine_factory.close(engine)
            del engine
        if self._duplicate_of is not None:
            self._duplicate_of._duplicates.discard(self)

    def revoke(self, reason: str) -> None:
        """End every wait of these ranks on this one, now and later, its duplicates' too, with a RevokedError.

        The first reason counts. Waits for nobody; any thread may call it.
        """
        self.engine.revoke(reason)
        for duplicate in list(self._duplicates):
            duplicate.revoke(reason)

    def quiesce(self, reason: str) -> None:
        """Begin nothing more, which is a RevokedError of this reason; return when what is under way is over.

        So with its duplicates. It ends where the other ranks have begun the same; or where the group is revoked.
        """
        self.engine.quiesce(reason)
        for duplicate in list(self._duplicates):
            duplicate.quiesce(reason)

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left the group."""
        return isinstance(self.engine, ClosedEngine)

    def require_open(self, what: str) -> None:
        """Raise a CommunicationError if the group has been left, where no collective would say so."""
        if isinstance(self.engine, ClosedEngine):
            raise self.error_of(what, self.engine.error())

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor for what travels often: in memory of the engine's, where it has some. Waits for nobody."""
        if device.type == "cpu" and isinstance(self.engine, HasMemory):
            memory = self.engine.empty(numel, dtype)
            if memory is not None:
                return memory
        return torch.zeros(numel, dtype=dtype, device=device)

    def describe_rank(self, rank: int) -> str:
        """The global rank of the group's ``rank``, and its host, such as ``rank 3 (node2)``."""
        return f"rank {self.ranks[rank]} ({self.hosts[rank]})"

    def error_of(self, what: str, error: BaseException) -> CommunicationError:
        """The engine's error as hvdlite's own."""
        where = f"{what} failed on {self.describe_rank(self.rank)}"
        if isinstance(error, RevokedError):
            return RevokedError(f"{where}: {error}")
        if "timed out" in str(error).lower():
            return CommunicationError(
                f"{where} because another rank did not take part in time: it hangs, or the ranks call different "
                f"things; raise hvd.init(timeout_s=...) if it is only slow. ({_first_line(error)})"
            )
        if isinstance(error, PeerGoneError):
            return self._error_of_end(where, _first_line(error), self.ranks[error.group_rank])
        if says_peer_lost(error):
            return self._error_of_end(where, _first_line(error))
        return CommunicationError(f"{where}: {_first_line(error)}")

    def group_rank_of_root(self, root_rank: object, what: str) -> int:
        """The rank in this group of a root that a user named by its global rank; a ValueError if it has none."""
        root = whole_number(root_rank)
        if root not in self.ranks:
            if self.set_id == 0:
                members = f"the {self.size} ranks, 0 to {self.size - 1}"
            else:
                members = f"the ranks of the process set, {', '.join(map(str, self.ranks))}"
            kind = WrongTypeError if root is None else ValueError
            raise kind(f"{what}: root_rank={shown(root_rank)} is not one of {members}")
        return self.ranks.index(root)

    def _error_of_end(self, where: str, words: str, seen: int | None = None) -> CommunicationError:
        """A rank has left: the global rank ``seen``, if the engine says which."""
        rank, by_itself = self._watch.first_end() or (seen, False)
        if rank is None or rank not in self.ranks:
            who = "another rank"
        else:
            who = self.describe_rank(self.ranks.index(rank))
            if by_itself:
                return CommunicationError(
                    f"{where} because {who} has ended: every rank must take as many steps, and call collectives as "
                    f"often; see hvd.join() for ranks with fewer batches. ({words})"
                )
        return PeerLostError(
            f"{where} because {who} has gone; what ended that rank is the cause, look for its own error. ({words})"
        )

    def _begun(self, work: EngineWork, what: str) -> Work:
        # So ranks can tell which of them have not begun what others wait for.
        watch = self._watch
        number = watch.begun[self.label] = watch.begun.get(self.label, 0) + 1
        watch.beginners.add(threading.get_ident())
        return Work(work, what, watch, self.error_of, (self.label, number, self.ranks))

    def all_reduce(self, tensor: Tensor, what: str, op: ReduceOp = Sum) -> Work:
        """Combine a contiguous tensor over all ranks, in place; of a dtype and an op that engines know.

        These are Sum, Min, Max and Product, of integers (not int16) and floats; others are `reduction`'s. Average of
        floats, too, where the engine `reduces_in_one_pass`.
        """
        try:
            work = self.engine.allreduce([tensor], _all_reduce_options(op))
        except RuntimeError as error:
            raise self.error_of(what, error) from error
        return self._begun(work, what)

    def all_reduce_into(self, output: Tensor, tensor: Tensor, what: str, op: ReduceOp = Sum) -> Work:
        """As `all_reduce`, and the tensor stays as it is; where the engine `reduces_in_one_pass`."""
        assert isinstance(self.engine, OnePassEngine), "the caller has asked"
        try:
            work = self.engine.allreduce_into(output, tensor, _all_reduce_options(op))
        except RuntimeError as error:
            raise self.error_of(what, error) from error
        return self._begun(work, what)

    def reduces_in_one_pass(self, tensor: Tensor) -> bool:
        """Whether the engine has `all_reduce_into` for such a tensor, and Average of floats; equal on all ranks."""
        return tensor.device.type == "cpu" and isinstance(self.engine, OnePassEngine)

    def broadcast(self, tensor: Tensor, root_rank: int, what: str) -> Work:
        """Overwrite a contiguous tensor with the root's; any dtype, since it travels as bytes."""
        options = dist.BroadcastOptions()
        options.rootRank = root_rank
        options.rootTensor = 0
        try:
            work = self.engine.broadcast([as_bytes(tensor)], options)
        except RuntimeError as error:
            raise self.error_of(what, error) from error
        return self._begun(work, what)

    def all_gather(self, tensor: Tensor, what: str, counts: Sequence[int] | None = None) -> list[Tensor]:
        """The flat bytes of every rank's contiguous tensor, in rank order; sizes may differ.

        ``counts`` are their bytes, where all ranks know them already; else they are exchanged first.
        """
        if counts is None:
            sizes = self._all_gather_even(torch.tensor([tensor.nbytes], dtype=torch.int64), what)
            counts = [int(size.item()) for size in sizes]
        parts, work = self.begin_all_gather(tensor, what, counts)
        work.wait()
        return parts

    def begin_all_gather(self, tensor: Tensor, what: str, counts: Sequence[int]) -> tuple[list[Tensor], Work]:
        """The flat bytes of every rank's contiguous tensor, in rank order, to be read when the work is done.

        ``counts`` are their sizes in bytes, equal on all ranks. They travel padded to the longest.
        """
        mine, longest = as_bytes(tensor), max(counts)
        if longest == 0:
            return [mine.new_empty(0) for _ in counts], Work(Done(), what, self._watch, self.error_of)
        padded = mine
        if mine.numel() < longest:
            padded = mine.new_zeros(longest)
            padded[: mine.numel()].copy_(mine)
        gathered, work = self._begin_all_gather_even(padded, what)
        return [part[:count] for part, count in zip(gathered, counts, strict=True)], work

    def all_to_all(
        self, tensor: Tensor, sent_bytes: Sequence[int], received_bytes: Sequence[int], what: str
    ) -> list[Tensor]:
        """Give each rank its part of a flat tensor of bytes; what each rank gave this one, in rank order.

        ``sent_bytes`` are the parts' sizes by rank, and ``received_bytes`` those that the others send here.
        """
        output = tensor.new_empty(sum(received_bytes))
        options = AllToAllOptions()
        try:
            work = self.engine.alltoall_base(output, tensor, list(received_bytes), list(sent_bytes), options)
        except RuntimeError as error:
            raise self.error_of(what, error) from error
        self._begun(work, what).wait()
        return pieces_of(output, received_bytes)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, counts: Sequence[int], what: str, op: ReduceOp = Sum
    ) -> Work:
        """Leave in ``output`` the combination over all ranks of this rank's part of a flat tensor.

        ``counts`` are the elements of each rank's part, equal on all ranks; dtypes and ops are as of `all_reduce`.
        """
        options = dist.ReduceScatterOptions()
        options.reduceOp = OP_OF_ENGINE[op]
        try:
            work = self.engine.reduce_scatter_base(output, tensor, list(counts), options)
        except RuntimeError as error:
            raise self.error_of(what, error) from error
        return self._begun(work, what)

    def all_gather_json(self, value: object, what: str) -> list[Any]:
        """Every rank's value, made of JSON's types, in rank order; tuples arrive as lists.

        Checked as by `all_gather_signed`.
        """
        data = json.dumps(value).encode()
        return [json.loads(each) for each in self.all_gather_signed(data, what, at_most_bytes=MAX_JSON_BYTES)]

    def all_gather_signed(self, data: bytes, what: str, *, at_most_bytes: int | None = None) -> list[bytes]:
        """The bytes of every rank, in rank order, each checked to come from that rank in this very call.

        A CommunicationError names the rank whose bytes are not signed with the job's key, or are more than
        ``at_most_bytes``. Lengths are believed, and memory taken for them, once they are known to be signed.
        """
        self._signed_count += 1
        header = self._sign_header(data, self.rank, what)
        headers = self._all_gather_even(torch.frombuffer(bytearray(header), dtype=torch.uint8), what)
        read = [self._read_header(bytes(each.tolist()), group_rank, what) for group_rank, each in enumerate(headers)]
        for group_rank, (length, _) in enumerate(read):
            if at_most_bytes is not None and length > at_most_bytes:
                raise CommunicationError(
                    f"{what} failed on {self.describe_rank(self.rank)}: {self.describe_rank(group_rank)} has {length} "
                    f"bytes to tell, more than the {at_most_bytes} that are taken"
                )
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        parts = self.all_gather(mine, what, [length for length, _ in read])
        digests = [its_digest for _, its_digest in read]
        return [self._checked(parts[rank], digests[rank], rank, what) for rank in range(self.size)]

    def broadcast_signed(self, data: bytes | None, root: int, what: str) -> bytes:
        """The bytes of rank ``root`` of this group, checked to come from it in this very call; others give None."""
        self._signed_count += 1
        header_bytes = _LENGTH_BYTES + 2 * TAG_BYTES
        header = torch.empty(header_bytes, dtype=torch.uint8)
        wire = torch.empty(0, dtype=torch.uint8)
        if data is not None:
            header = torch.frombuffer(bytearray(self._sign_header(data, root, what)), dtype=torch.uint8)
            wire = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else wire
        self.broadcast(header, root, what).wait()
        length, expected = self._read_header(bytes(header.tolist()), root, what)
        if data is None:
            wire = torch.empty(length, dtype=torch.uint8)
        if length:
            self.broadcast(wire, root, what).wait()
        return self._checked(wire, expected, root, what)

    def _sign_header(self, data: bytes, group_rank: int, what: str) -> bytes:
        """What travels before the data: its length, its digest, and the signature of both by whom, in which call."""
        length, own_digest = len(data), digest(data)
        tag = self.signer.sign(what, self._signed_count, group_rank, length, own_digest)
        return length.to_bytes(_LENGTH_BYTES, "big") + own_digest + tag

    def _read_header(self, header: bytes, group_rank: int, what: str) -> tuple[int, bytes]:
        """The length and the digest of what rank ``group_rank`` is about to send."""
        length = int.from_bytes(header[:_LENGTH_BYTES], "big")
        its_digest, tag = header[_LENGTH_BYTES:-TAG_BYTES], header[-TAG_BYTES:]
        if not self.signer.is_signed(tag, what, self._signed_count, group_rank, length, its_digest):
            raise self._forged(group_rank, what)
        return length, its_digest

    def _checked(self, part: Tensor, expected: bytes, group_rank: int, what: str) -> bytes:
        # Without numpy, which torch does not require, and without a Python int per byte.
        data = ctypes.string_at(part.data_ptr(), part.numel()) if part.numel() else b""
        if digest(data) != expected:
            raise self._forged(group_rank, what)
        return data

    def _forged(self, group_rank: int, what: str) -> CommunicationError:
        return CommunicationError(
            f"{what} failed on {self.describe_rank(self.rank)}: what came in the name of "
            f"{self.describe_rank(group_rank)} is not signed with this job's key, or not for this call: something on "
            "the way between the two has changed or replaced it"
        )

    def agree(self, value: object, what: str) -> list[Any] | None:
        """None if every rank passed an equal value (by its repr; made of JSON's types), else all values in rank order.

        Costs 32 bytes per rank where all agree, which is always but for a mistake.
        """
        own = digest(repr(value).encode())
        parts = self._all_gather_even(torch.frombuffer(bytearray(own), dtype=torch.uint8), what)
        if all(torch.equal(part, parts[0]) for part in parts):
            return None
        return self.all_gather_json(value, what)

    def _all_gather_even(self, tensor: Tensor, what: str) -> list[Tensor]:
        outputs, work = self._begin_all_gather_even(tensor, what)
        work.wait()
        return outputs

    def _begin_all_gather_even(self, tensor: Tensor, what: str) -> tuple[list[Tensor], Work]:
        outputs = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            work = self.engine.allgather([outputs], [tensor])
        except RuntimeError as error:
            raise self.error_of(what, error) from error
        return outputs, self._begun(work, what)


def _all_reduce_options(op: ReduceOp) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG) if op is Average else OP_OF_ENGINE[op]
    return options


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
