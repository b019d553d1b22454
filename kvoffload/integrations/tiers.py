"""The steps that all integrations take with a tier: check its options, open and close it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvoffload.errors import describe
from kvoffload.tiers import Tier, TierError

TEXTS = ("url", "weights_id", "revision", "salt", "generation", "generation_file")
"""Options that are text, or None as without the option."""

CLOSE_S = 5.0
"""Seconds for transfers under way to end when a tier is closed."""


def check_text(name: str, value: Any) -> None:
    """Raise TypeError unless an option is text or None."""
    if value is not None and not isinstance(value, str):
        shown = type(value).__name__ if name == "url" else describe(value)  # no password
        raise TypeError(f"{name} must be text, got {shown}")


def check_options(
    options: Mapping[str, Any], known: Collection[str], others: Collection[str] = ()
) -> None:
    """Check the options of a tier, which are among `known`; `others` belong to the engine.

    Raise TypeError or ValueError if one is unknown or not text, or none names the tier.
    """
    for name in options:
        if name not in known and name not in others:
            raise ValueError(
                f"an option must be one of {', '.join(known)}, got {str(name)[:100]!r}"
            )
    for name in TEXTS:
        check_text(name, options.get(name))
    if not options.get("url"):
        raise ValueError(
            "url must name a tier, as slab:/nvme/kv?capacity=2TB, "
            f"got {describe(options.get('url'))}"
        )


@contextmanager
def opening(tier: Tier) -> Iterator[Tier]:
    """Yield a new tier, and close it if the block raises."""
    try:
        yield tier
    except BaseException:
        tier.close(0.0)
        raise


def close(tier: Tier, owner: str, close_tier: Callable[[float], bool] | None = None) -> None:
    """Close a tier, by `close_tier` if that is not its own method.

    Raise TierError if a system call that may still use the memory of `owner` has not returned.
    """
    if not (close_tier or tier.close)(CLOSE_S) and tier.direct:
        raise TierError(
            f"tier {tier.name!r} has a call that has not returned in {CLOSE_S:.0f} s; it may still "
            f"use {owner} memory"
        )
