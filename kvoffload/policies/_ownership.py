"""Ownership of policies: only its manager may change a policy, and a second one is refused.

A policy may be of any class, so the entries are kept here, by identity, and not in the policy. The
manager keeps its policy alive, so no other object takes its identity; the entry is dropped with the
manager.
"""

from __future__ import annotations

import weakref
from functools import partial

_Owners = dict[int, weakref.ref[object]]
_owners: _Owners = {}


def owner_of(policy: object) -> object | None:
    """Return the manager that owns a policy, or None if the policy is free."""
    reference = _owners.get(id(policy))
    return None if reference is None else reference()


def check_owner(policy: object, manager: object) -> None:
    """Raise ValueError if a policy belongs to another manager than `manager`."""
    owner = owner_of(policy)
    if owner is not None and owner is not manager:
        raise ValueError(
            "cache_policy must not belong to another manager, "
            f"got the {type(policy).__name__} of one"
        )


def take(policy: object, manager: object) -> None:
    """Make `manager` the owner of a policy; ValueError if it has another."""
    key = id(policy)
    # Bound, since the module may be gone before the last manager is; not in a closure, since
    # CPython 3.12 and 3.13 crash if no memory is left to create one.
    mine = weakref.ref(manager, partial(_forget, _owners, key))
    if _owners.setdefault(key, mine) is not mine:  # atomic: of two threads one is refused
        check_owner(policy, manager)
        _owners[key] = mine


def _forget(owners: _Owners, key: int, reference: weakref.ref[object]) -> None:
    if owners.get(key) is reference:
        del owners[key]


def release(policy: object, manager: object) -> None:
    """Free a policy if it belongs to `manager`."""
    if owner_of(policy) is manager:
        del _owners[id(policy)]
