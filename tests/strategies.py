"""Generated batches: few blocks, so that they meet again, with keys of every length."""

from __future__ import annotations

from hypothesis import strategies as st

from kvoffload import BlockHash
from tests.blocks import KEY_LENGTHS, block_hash

KEYS = [block_hash(number, max(4, length)) for number, length in enumerate(KEY_LENGTHS * 2)]


def key(number: int) -> BlockHash:
    """Return one of the keys."""
    return KEYS[number]


BLOCKS = st.integers(0, len(KEYS) - 1).map(key)
BATCHES = st.lists(BLOCKS, max_size=8)
