"""The public managers as they are where the other implementation was chosen."""

from __future__ import annotations

import types
from typing import Any, get_args, get_origin

import kvoffload
from kvoffload.policies import registry
from kvoffload.policies.base import CachePolicy

GIVEN_ANEW = {
    *("__dict__", "__weakref__", "__orig_bases__", "__parameters__"),
    *("__abstractmethods__", "_abc_impl"),
}


def rebuild(public: type, skeleton: Any) -> Any:
    """Return a public manager over `skeleton`: itself, if it stands over that already."""
    if issubclass(public, skeleton):
        return public
    body = {name: value for name, value in vars(public).items() if name not in GIVEN_ANEW}
    (over,) = public.__orig_bases__  # type: ignore[attr-defined]
    base = get_origin(over)
    base = skeleton if base.__name__ == skeleton.__name__ else rebuild(base, skeleton)
    return types.new_class(
        public.__name__, (base[get_args(over)],), exec_body=lambda space: space.update(body)
    )


def managers_over(skeleton: Any) -> tuple[Any, Any, Any]:
    """Return the public managers over `skeleton`."""
    managers = (
        kvoffload.CPUOffloadingManager,
        kvoffload.LRUOffloadingManager,
        kvoffload.ARCOffloadingManager,
    )
    return tuple(rebuild(each, skeleton) for each in managers)


def policy_of_twin(name: str, twin: str) -> type[CachePolicy]:
    """Return the class of a registered policy in Python, ``py``, or compiled, ``c``."""
    return registry.load(registry.parse(name).entry, twin)
