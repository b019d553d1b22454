"""Ownership of policies: only its manager may change a policy, and a second one is refused.

A policy may be of any class, so nothing is asked of it: the entries stand here, by identity. The
manager keeps its policy alive, so that no other object has its identity; the entry goes with the
manager.
"""

from __future__ import annotations

import weakref

_Owners = dict[int, weakref.ref[object]]
_owners: _Owners = {}


def owner_of(policy: object) -> object | None:
    """Return the manager that a policy belongs to, None if it is free."""
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

    def forget(reference: weakref.ref[object], owners: _Owners = _owners) -> None:
        # Bound, since the module may be gone before the last manager is.
        if owners.get(key) is reference:
            del owners[key]

    mine = weakref.ref(manager, forget)
    if _owners.setdefault(key, mine) is not mine:  # in one step: of two threads one is refused
        check_owner(policy, manager)
        _owners[key] = mine


def release(policy: object, manager: object) -> None:
    """Make a policy free again, if it belongs to `manager`."""
    if owner_of(policy) is manager:
        del _owners[id(policy)]
