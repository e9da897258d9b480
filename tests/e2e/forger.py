"""An attacker that can write to a job's store but does not know the job's secret.

    python forger.py ADDRESS PORT KIND MARKER

It waits for rank 0's info in the store and stores a forged info of rank 1 before rank 1 does. For KIND
"shared memory" it forges rank 1's control block instead, and then waits until stdin is closed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pickle
import secrets
import sys
import tempfile
import time
from datetime import timedelta

import torch.distributed as dist
from e2e.intruder import BRACKETS, Touch

INTRODUCTIONS = ("unsigned", "wrong key", "of rank 0", "pickle", "nesting", "large")
SHARED_MEMORY = "shared memory"


def main() -> None:
    address, port, kind, marker = sys.argv[1:]
    store = dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=100))
    if kind == SHARED_MEMORY:
        # A file of this user's that is too short for a control block.
        with tempfile.TemporaryFile() as short:
            where = {"host": "a", "pid": os.getpid(), "fd": short.fileno(), "file": short.fileno(), "token": 0}
            # Take the key's prefix from that of rank 0's control block.
            key_of_control_block = _key(store, "control block0")[:-1] + "1"
            store.set(key_of_control_block.replace("control block", "seen"), "{}")
            store.set(key_of_control_block, json.dumps(where))
            print("forged", flush=True)
            sys.stdin.read()
        return
    key_of_0 = _key(store, "introduction/0")
    store.set(key_of_0[:-1] + "1", _forged(kind, store.get(key_of_0), marker))
    print("forged", flush=True)


def _key(store: dist.TCPStore, end: str) -> str:
    while True:
        for key in store.list_keys():
            if key.endswith(end):
                return str(key)
        time.sleep(0.02)


def _forged(kind: str, true: bytes, marker: str) -> bytes:
    text = true[64:].decode().replace('"rank": 0', '"rank": 1')
    if kind == "unsigned":
        return text.encode()
    if kind == "wrong key":
        tag = hmac.new(secrets.token_bytes(32), text.encode(), hashlib.sha256).hexdigest()
        return (tag + text).encode()
    if kind == "of rank 0":
        return true
    if kind == "pickle":
        return pickle.dumps(Touch(marker))
    return b"0" * 64 + b"[" * BRACKETS if kind == "nesting" else b"[" * (4 << 20)


if __name__ == "__main__":
    main()
