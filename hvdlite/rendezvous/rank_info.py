"""
Exchanges every rank's placement and settings through the store, signed, before the ranks connect to each other.

    agree_on_secret ── this rank's signed RankInfo to the store ── all ranks' RankInfo, checked ── Signer for this init

Anybody on the network may be able to write to the store (a TCPStore has no password). So each entry is limited in size,
its signature is checked first, and it is read as JSON; nothing is unpickled. `runtime.make_world` calls these functions
in `hvd.init`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from ..errors import CommunicationError, LaunchEnvironmentError, MismatchError, describe_interrupt, list_names
from ..signing import TAG_BYTES, Signer
from .placement import Placement

SECRET, SECRET_FILE = "HVDLITE_SECRET", "HVDLITE_SECRET_FILE"

_LEAST_BYTES = 16
_MOST_BYTES = 65536
_HOW = "make one with: python -c 'import secrets; print(secrets.token_hex(32))'"


def given_secret(environ: Mapping[str, str]) -> bytes | None:
    """Returns the secret that the user has set, or None.

    Raises a LaunchEnvironmentError if it is too short, or if its file is missing or readable by other users.
    """
    text, path = environ.get(SECRET, ""), environ.get(SECRET_FILE, "")
    if text and path:
        raise LaunchEnvironmentError(f"both {SECRET} and {SECRET_FILE} are set: set only one of them")
    if path:
        return _checked(_read_file(path), f"the file {path} of {SECRET_FILE}")
    return _checked(text.encode(errors="surrogateescape"), SECRET) if text else None


def new_secret() -> str:
    """Returns a random secret, as hexadecimal digits, which every launcher's exchange can transport."""
    return secrets.token_hex(32)


def _read_file(path: str) -> bytes:
    try:
        # Non-blocking: opening a pipe without a writer would hang.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise LaunchEnvironmentError(f"{SECRET_FILE}={path} is not a regular file: {_HOW} > {path}")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise LaunchEnvironmentError(f"{SECRET_FILE}={path} can be read by other users: chmod 600 {path}")
            return file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise LaunchEnvironmentError(
            f"{SECRET_FILE}={path} cannot be read on this host: {error.strerror}. It must be there on every host, with "
            f"the same content; {_HOW} > {path}"
        ) from error


def _checked(secret: bytes, where: str) -> bytes:
    if len(secret) < _LEAST_BYTES:
        raise LaunchEnvironmentError(f"{where} has {len(secret)} bytes, and needs at least {_LEAST_BYTES}: {_HOW}")
    return secret


MAX_BYTES = 1 << 16
"""The size limit of one rank's info in the store."""

_GIVEN = "given"  # rank 0 stores this instead of a secret if the user has given one


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What each rank sends to all others in `hvd.init`.

    ``settings`` maps names to values; `runtime.make_world` compares those that must be equal. ``nonce`` is random and
    never used before.
    """

    placement: Placement
    pid: int
    version: str
    settings: Mapping[str, Any]
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))


def agree_on_secret(store: Store, rank: int, given: bytes | None) -> bytes:
    """Returns the secret of all ranks: the ``given`` one, or a random one that rank 0 puts into the store.

    In the second case, everybody who can read the store knows the secret. Every rank must call it, and waits for
    rank 0. Raises a LaunchEnvironmentError if only one of rank 0 and this rank was given a secret.
    """
    key = "secret"
    if rank == 0:
        text = _GIVEN if given is not None else new_secret()
        store.set(key, text)
    else:
        text = store.get(key)[:MAX_BYTES].decode(errors="replace")
    if (text == _GIVEN) == (given is not None):
        return text.encode() if given is None else given
    has, has_not = ("this rank", "rank 0") if given is not None else ("rank 0", "this rank")
    raise LaunchEnvironmentError(
        f"hvd.init() failed on rank {rank}: {has} has {SECRET}, and {has_not} does not: set it to the same value for "
        "every rank, or for none"
    )


def exchange_rank_info(
    store: Store, own: RankInfo, signer: Signer, timeout: timedelta
) -> tuple[list[RankInfo], Signer]:
    """Sends this rank's info and returns that of all ranks, in rank order. Every rank must call it, and waits for all.

    Also returns a signer whose key is different in every init. Raises a CommunicationError that names ranks whose info
    is missing after ``timeout``, or not signed with this key.
    """
    rank, size = own.placement.rank, own.placement.size
    keys = [f"introduction/{other}" for other in range(size)]
    data = json.dumps(asdict(own))
    store.set(keys[rank], signer.sign("introduction", rank, data).hex() + data)
    try:
        store.wait(keys, timeout)
    except KeyboardInterrupt as interrupt:
        if late := _late(store, keys):
            describe_interrupt(interrupt, f"hvd.init() for rank {_numbers(late)}")
        raise
    except RuntimeError as error:
        raise CommunicationError(_words_of_late(store, keys, own, timeout, error)) from error
    # Stores on files have no multi_get.
    is_extended: bool = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stubs
    values = store.multi_get(keys) if is_extended else [store.get(key) for key in keys]
    introductions = [_read(value, other, own, signer) for other, value in enumerate(values)]
    return introductions, signer.derive("init", *(introduced.nonce for introduced in introductions))


def refuse(store: Store, rank: int) -> None:
    """Stores an invalid info for this rank, which is failing, so that the others fail at once instead of waiting."""
    with contextlib.suppress(RuntimeError):
        store.set(f"introduction/{rank}", "refused")


def _read(value: bytes, rank: int, own: RankInfo, signer: Signer) -> RankInfo:
    text = value[: MAX_BYTES + 1].decode(errors="replace")
    tag, data = text[: 2 * TAG_BYTES], text[2 * TAG_BYTES :]
    if len(value) > MAX_BYTES or not signer.is_signed_hex(tag, "introduction", rank, data):
        raise CommunicationError(
            f"hvd.init() failed on rank {own.placement.rank} ({own.placement.host}): the data received from rank "
            f"{rank} are not signed with this rank's secret: set {SECRET} to the same value for every rank; if it is "
            "the same, another program can write to the ranks' store"
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
        return f"{where}: the ranks' store failed: {error}"
    return (
        f"{where}: another rank did not call it within {timeout.total_seconds():g} s, or ended before it did: missing: "
        f"rank {_numbers(late)}. ({str(error).strip().partition(chr(10))[0]})"
    )


def _late(store: Store, keys: Sequence[str]) -> list[int]:
    """Returns the ranks whose info is not in the store; [] if the store does not answer."""
    with contextlib.suppress(RuntimeError):
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _numbers(ranks: Sequence[int]) -> str:
    return list_names([str(rank) for rank in ranks], len(ranks))
