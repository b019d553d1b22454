"""Parts of the manager skeleton that both twins use."""

from __future__ import annotations

from typing import Any


def summary(manager: Any) -> str:
    """Return the ``repr`` of a manager of either twin."""
    name = type(manager).__name__
    try:
        policy = type(manager.policy).__name__
    except RuntimeError:
        return f"<{name}, not initialised>"
    stats = manager.stats()
    return (
        f"<{name} over {policy}: {stats['resident']} of {stats['resident'] + stats['free']} "
        f"blocks resident, {stats['pending']} pending, {stats['pinned']} pinned>"
    )
