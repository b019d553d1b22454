"""Counts of a policy at a capacity: hits, stores, evictions, refusals, tokens."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one policy at one capacity.

    With several KV groups `asked` and `hits` are tokens, `stored` and `evicted` are slots.

    Attributes
    ----------
    requests, blocks : int
        Requests replayed, and the blocks of all of them.
    asked : int
        Blocks that the manager was asked for: those from the first one of each request that the
        accelerator's own cache did not have. Without one, `blocks`.
    hits : int
        Blocks of those that the manager had.
    stored, evicted, refused, not_admitted : int
        As in `ReplayResult`. For a ceiling only `stored` is known; the others are 0.
    tokens : int
        Prompt tokens of all requests whose length is known.
    hit_tokens : int or None
        Prompt tokens that the blocks hit hold; None where the block size is not known, and for
        ``"belady"``, which hits the most blocks and not the most tokens.
    loaded : int
        Slots loaded for the hits, with several KV groups; else 0, because those are `hits`.
    """

    requests: int
    blocks: int
    asked: int
    hits: int
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    not_admitted: int = 0
    tokens: int = 0
    hit_tokens: int | None = None
    loaded: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks asked for that were hits; 0 if there are none."""
        return self.hits / self.asked if self.asked else 0.0

    @property
    def token_hit_ratio(self) -> float | None:
        """Share of the prompt tokens that lay in hit blocks.

        None where `hit_tokens` is, or where the lengths of the prompts are not known.
        """
        return tokens_ratio(self.hit_tokens, self.tokens)


def prompt_tokens(on_device: int, found: int, block_tokens: int, length: int) -> int:
    """Return the prompt tokens of the `found` blocks after those that the device has.

    The last block of a prompt may be filled only partly: of a prompt of `length` tokens no more
    than that many count.
    """
    return min((on_device + found) * block_tokens, length) - min(on_device * block_tokens, length)


def tokens_ratio(hit_tokens: int | None, tokens: int) -> float | None:
    """Return the share of the prompt tokens that were hit, None where it is not known."""
    return None if hit_tokens is None or not tokens else hit_tokens / tokens
