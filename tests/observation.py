"""Everything a caller can see of a manager, a policy or a backend, as values that compare.

The attributes are found by looking, not by name, so that a new policy is covered by all that
compares observations on the day it is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import astuple
from functools import cache
from typing import Any

import numpy as np

from kvoffload import BlockStatus, OffloadError
from kvoffload.types import HintGain, HintSource

PARTS = ("policy", "backend")
"""Attributes of a manager that are observed in turn."""

PLAIN = (bytes, int, float, str, type(None))


@cache
def members_of(kind: type) -> frozenset[str]:
    """Return the names of the public attributes that a class has for its objects, no methods."""
    public = (name for name in dir(kind) if not name.startswith("_"))
    return frozenset(name for name in public if not callable(getattr(kind, name, None)))


def attributes(thing: Any) -> list[str]:
    """Return the names of the public attributes of `thing` that are not methods."""
    own = (name for name in getattr(thing, "__dict__", ()) if not name.startswith("_"))
    return sorted(members_of(type(thing)).union(own))


def as_value(value: Any) -> Any:
    """Return `value` in a form that compares by content, order included."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, BlockStatus):
        return value.ref_cnt, value.block_id
    if isinstance(value, np.ndarray):
        if value.dtype.names:
            return sorted(value.tolist())
        return value.tolist()
    if isinstance(value, Mapping):
        return [(key, as_value(item)) for key, item in value.items()]
    if hasattr(value, "medium") and hasattr(value, "removed"):
        return list(value.block_hashes), value.block_size, value.medium, value.removed
    if hasattr(value, "block_hashes_to_store"):
        stored, evicted = list(value.block_hashes_to_store), list(value.block_hashes_evicted)
        return stored, as_value(value.store_spec), evicted
    if hasattr(value, "block_ids"):
        return type(value).__name__, value.medium(), as_value(value.block_ids)
    if isinstance(value, HintSource | HintGain):
        return astuple(value)
    if isinstance(value, Iterable) and isinstance(value, Sized):
        return [as_value(item) for item in value]
    return type(value).__name__


def observe(thing: Any) -> dict[str, Any]:
    """Return all that can be seen of `thing` without changing it."""
    seen: dict[str, Any] = {}
    for name in attributes(thing):
        value = getattr(thing, name)
        seen[name] = observe(value) if name in PARTS else as_value(value)
    if hasattr(thing, "__len__"):
        try:
            seen["len"] = len(thing)
        except NotImplementedError:
            seen["len"] = None
    for name in ("stats", "get_num_free_blocks"):
        if hasattr(thing, name):
            seen[name] = getattr(thing, name)()
    return seen


def attempt(
    thing: Any, method: str, *arguments: Any, form: Callable[[Any], Any] | None = None
) -> tuple[str, Any]:
    """Call a method and return its result or its error as a value that compares.

    Where `form` is given, it makes the first argument of the one that is given.
    """
    given = (form(arguments[0]), *arguments[1:]) if form else arguments
    try:
        result = getattr(thing, method)(*given)
    except (OffloadError, TypeError, ValueError, NotImplementedError) as error:
        bases = [base.__name__ for base in type(error).__mro__]
        return "raised", (bases, str(error))
    if method == "take_events":
        result = list(result)
    return "returned", as_value(result)
