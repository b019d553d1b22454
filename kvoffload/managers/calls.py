"""Calls of an engine that begins no `Request`, or adds to what one has stored.

A scheduler like vLLM's shows a request's blocks piece by piece, and those that it has used only
when it ends. A store with tiers puts blocks into host memory on behalf of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from kvoffload.types import BlockHash, Hints

from .base import Request


def begin(manager: Any, hashes: list[BlockHash], hints: Hints | None) -> None:
    """Use the blocks of a request for the first time."""
    manager._begun(hashes, hints)


def touch_stored(manager: Any, hashes: Iterable[bytes], stored: Collection[bytes]) -> None:
    """Touch blocks; those in `stored` as if still being stored, which counts as no use.

    For a request that has stored them itself and whose stores have already ended.
    """
    manager._skeleton._touch_inserted(hashes, stored)


def finish(manager: Any, hashes: list[BlockHash], hints: Hints | None) -> None:
    """Use the blocks of a request for the last time."""
    manager._skeleton._used_last(hashes, hints)


def end(manager: Any, hashes: list[Any], own: Collection[bytes], num_last: int = 1) -> None:
    """Note the session of a request that has ended.

    `own` are the blocks that it has stored. The session may go on after each of the `num_last`
    blocks at the end, of all groups.
    """
    manager._skeleton._served_at_once(hashes, own, num_last)


def unshared(manager: Any, hashes: Iterable[bytes]) -> list[BlockHash]:
    """Return the resident blocks that only one session uses, as far as a manager knows."""
    found: list[BlockHash] = manager._skeleton._unshared(hashes)
    return found


def note_loaded(request: Request[Any], start: int, stop: int) -> None:
    """Note that a part has been pinned for a request, which `Request.complete_load` releases."""
    request._note_loaded(start, stop)


def note_own(request: Request[Any], first: int) -> None:
    """Note that blocks are being stored for a request, the first at this position."""
    request._note_own(first)
