"""
Exchanges the placement and settings of all ranks as signed JSON in the store, before any of them connects.

    secret ── own introduction, signed ── store ── everybody's, checked ── Signer with a key of this init alone

The store may be one that others can write to (a TCPStore has no password). What is in it is therefore read as JSON, of
known types and of a size with a limit, after its signature has been checked; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from ..errors import CommunicationError, LaunchEnvironmentError, MismatchError, say_where
from ..signing import TAG_BYTES, Signer
from .placement import Placement
from .secret import SECRET, new_secret

MAX_BYTES = 1 << 16
"""Of one rank's introduction."""

_GIVEN = "given"  # in place of a secret: the user has given one to the ranks
_PARTING = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What one rank tells all others of itself as it enters `hvd.init`.

    ``settings`` are by name; those that have to agree are compared by whoever knows them. ``nonce`` was never used.
    """

    placement: Placement
    pid: int
    version: str
    settings: Mapping[str, Any]
    nonce: str

    @classmethod
    def of(cls, placement: Placement, pid: int, version: str, settings: Mapping[str, Any]) -> RankInfo:
        return cls(placement, pid, version, settings, secrets.token_hex(16))


def agree_on_secret(store: Store, rank: int, given: bytes | None) -> bytes:
    """The secret of all ranks: the given one, or rank 0's through the store, whose users are then those who know it.

    A LaunchEnvironmentError where only one of rank 0 and this rank was given one.
    """
    key = "secret"
    if rank == 0:
        told = _GIVEN if given is not None else new_secret()
        store.set(key, told)
    else:
        told = store.get(key)[:MAX_BYTES].decode(errors="replace")
    if (told == _GIVEN) == (given is not None):
        return told.encode() if given is None else given
    has, has_not = ("this rank", "rank 0") if given is not None else ("rank 0", "this rank")
    raise LaunchEnvironmentError(
        f"hvd.init() failed on rank {rank}: {has} has {SECRET}, and {has_not} does not: set it to the same value for "
        "every rank, or for none"
    )


def exchange_rank_info(
    store: Store, own: RankInfo, signer: Signer, timeout: timedelta
) -> tuple[list[RankInfo], Signer]:
    """Everybody's introduction, in rank order, and a signer whose key no other meeting has. Waits for all ranks.

    A CommunicationError names those who do not come, or whose introduction is not signed with this key.
    """
    rank, size = own.placement.rank, own.placement.size
    keys = [f"introduction/{other}" for other in range(size)]
    data = json.dumps(asdict(own))
    store.set(keys[rank], signer.sign("introduction", rank, data).hex() + data)
    try:
        store.wait(keys, timeout)
    except KeyboardInterrupt as interrupt:
        if late := _late(store, keys):
            say_where(interrupt, f"hvd.init() for {_named(late)}")
        raise
    except RuntimeError as error:
        raise CommunicationError(_words_of_late(store, keys, own, timeout, error)) from error
    # Stores on files have no multi_get.
    is_extended: bool = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stubs
    values = store.multi_get(keys) if is_extended else [store.get(key) for key in keys]
    introductions = [_read(value, other, own, signer) for other, value in enumerate(values)]
    return introductions, signer.derive("init", *(introduced.nonce for introduced in introductions))


def refuse(store: Store, rank: int) -> None:
    """Let those who wait for this rank's introduction go on, to find that it has none."""
    with contextlib.suppress(RuntimeError):
        store.set(f"introduction/{rank}", "refused")


def _read(value: bytes, rank: int, own: RankInfo, signer: Signer) -> RankInfo:
    text = value[: MAX_BYTES + 1].decode(errors="replace")
    tag, data = text[: 2 * TAG_BYTES], text[2 * TAG_BYTES :]
    if len(value) > MAX_BYTES or not signer.is_signed_hex(tag, "introduction", rank, data):
        raise CommunicationError(
            f"hvd.init() failed on rank {own.placement.rank} ({own.placement.host}): the introduction of rank {rank} "
            f"is not signed with this rank's secret: set {SECRET} to the same value for every rank; if it is, somebody "
            "else can write to where the ranks meet"
        )
    fields = json.loads(data)
    if fields["version"] != own.version:
        raise MismatchError(
            f"hvdlite is version {own.version} on rank {own.placement.rank} ({own.placement.host}) and "
            f"{fields['version']} on rank {rank} ({fields['placement']['host']}): install the same version everywhere"
        )
    return RankInfo(**{**fields, "placement": Placement(**fields["placement"])})


def _words_of_late(store: Store, keys: Sequence[str], own: RankInfo, timeout: timedelta, error: RuntimeError) -> str:
    where = f"hvd.init() failed on rank {own.placement.rank} ({own.placement.host})"
    late = _late(store, keys)
    if not late:
        return f"{where}: the ranks cannot find each other: {error}"
    return (
        f"{where}: another rank did not call it within {timeout.total_seconds():g} s, or ended before it did: waited "
        f"for {_named(late)}. ({str(error).strip().partition(chr(10))[0]})"
    )


def _late(store: Store, keys: Sequence[str]) -> list[int]:
    """The ranks whose info is not in the store; none where it cannot be asked."""
    with contextlib.suppress(RuntimeError):
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _named(ranks: Sequence[int]) -> str:
    return "rank " + ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
