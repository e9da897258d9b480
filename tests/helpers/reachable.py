"""Counts the objects that some objects keep alive, to find what grows with the number of repetitions."""

from __future__ import annotations

import gc
import types
from collections import Counter

_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def reachable(*roots: object) -> Counter[str]:
    """Returns how many objects of each type can be reached from these, by references of any kind.

    Types, modules and functions are left out, and what only they keep alive, since all programs share them.
    """
    seen: dict[int, object] = {}
    left = list(roots)
    while left:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, _SHARED):
            seen[id(each)] = each
            left += gc.get_referents(each)
    return Counter(type(each).__name__ for each in seen.values())
