"""Generated batches, of few blocks, so that they meet again, and the letters of texts."""

from __future__ import annotations

from hypothesis import strategies as st

from kvoffload import BlockHash
from tests.blocks import KEY_LENGTHS, block_hash

KEYS = [block_hash(number, max(4, length)) for number, length in enumerate(KEY_LENGTHS * 2)]


def key(number: int) -> BlockHash:
    """Return one of the keys."""
    return KEYS[number]


LETTERS = "az09 =&?.:/-_%\\'\"<\0\t\n\x7f\xa0\u00e9\u0301\u202e\u20ac\ufeff\U0001f600"
"""Those of texts of any kind; hypothesis takes seconds of each process to learn all there are."""
BLOCKS = st.integers(0, len(KEYS) - 1).map(key)
BATCHES = st.lists(BLOCKS, max_size=8)
