"""Lines of a recording: the calling thread packs requests, the log's thread makes text of them.

An id is SipHash-2-4 of the block hash's Python hash, keyed with the salt. SipHash is a
pseudo-random function (Aumasson & Bernstein, INDOCRYPT 2012): without the salt an id reveals
nothing of the hash, not even to someone who can guess it. The 8-byte message is ``hash()`` of the
block hash, so a hash of any length takes the same path. 52 of the 64 bits are kept, 13 per group of
four digits. The first group is never below 1000, so every id has 16 digits and is written without a
division. Among n blocks two share an id with a chance of about n² / 2⁵³.

The standard library's keyed BLAKE2b was tried instead and not kept: measured in turn in one
process, an id took 640 ns of CPU time under the interpreter's lock, against 14 ns compiled. At
100,000 blocks per second that is 6 % of a core, and the slowest hundredth of a scheduler thread's
steps, which wait for that lock, took 15 ms instead of 4.
"""

from __future__ import annotations

import sys
import time
from array import array

import numpy as np
import numpy.typing as npt

ID_BYTES = 17  # sixteen digits and a comma
LINE_BYTES = 145  # at most, of a line without its ids: 85 and three numbers of 20 digits

_WORD_BYTES = 8
_LINE = b'{"timestamp":%d,"input_length":%d,"output_length":0,"hash_ids":[%b]%b}\n'
_MORE_TOKENS, _HINTED = 1, 2  # bits of the first word
_BATCH = 500  # numpy keeps the interpreter's lock up to here: giving it back may cost milliseconds
_GROUP_BITS = 13
_GROUP_MASK = np.uint64(2**_GROUP_BITS - 1)
_MESSAGE_END = np.uint64(8 << 56)  # the length of the message, as SipHash ends it

# The four digits of every value of a group; the first group counts from 1000.
_DIGITS = np.array(
    [list(b"%04d" % value) for value in range(2**_GROUP_BITS + 1000)], dtype=np.uint8
)

Words = npt.NDArray[np.uint64]


def packed(hashes: list[bytes], more_tokens: int = 0, said: int = 0) -> bytes:
    """Return the time of a request and ``hash()`` of each block hash, 8 bytes each.

    In the machine's byte order: the monotonic clock, ns; `said`, unless it is 0; the hashes. The
    clock's last bit is `more_tokens`, the tokens of the request beyond those of its blocks, 0 or 1.
    The bit before it is set if `said` follows, the client's hints on its session: milliseconds
    until the next request, at most 2**53, 0 if unknown, times 2, plus 1 if the session ends.
    """
    moment = time.monotonic_ns() + 3 & -4 | more_tokens  # never before the recording began
    if said:
        return array("q", [moment | _HINTED, said, *map(hash, hashes)]).tobytes()
    return array("q", [moment, *map(hash, hashes)]).tobytes()


def request_lines(
    requests: list[bytes], low: int, high: int, start: int, block_tokens: int
) -> bytes:
    """Return requests from `packed` as lines in the Mooncake format.

    The salt is two words of 64 bits; `start` is the start of the recording by the monotonic clock,
    ns; a block has at most 2**31 - 1 tokens. A line has at most `LINE_BYTES`, plus `ID_BYTES` per
    block.
    """
    heads = [_word(request, 0) for request in requests]
    hashes = [
        request[_WORD_BYTES * (2 if moment & _HINTED else 1) :]
        for request, moment in zip(requests, heads, strict=True)
    ]
    ids = _salted_texts(b"".join(hashes), low, high)
    lines = []
    first = 0
    for request, moment, words in zip(requests, heads, hashes, strict=True):
        blocks = len(words) // _WORD_BYTES
        last = first + blocks * ID_BYTES
        text = ids[first : last - bool(blocks)]  # without the last comma
        tokens = blocks * block_tokens + (moment & _MORE_TOKENS)
        said = _said_text(_word(request, 1)) if moment & _HINTED else b""
        lines.append(_LINE % ((moment - start) // 1_000_000, tokens, text, said))
        first = last
    return b"".join(lines)


def _word(request: bytes, index: int) -> int:
    """Return a word of a packed request."""
    start = index * _WORD_BYTES
    return int.from_bytes(request[start : start + _WORD_BYTES], sys.byteorder, signed=True)


def _said_text(said: int) -> bytes:
    """Return the fields of a row for the client's hints on its session."""
    expect = b',"expect":%d' % (said >> 1) if said >> 1 else b""
    return expect + (b',"ends":true' if said & 1 else b"")


def _salted_texts(words: bytes, low: int, high: int) -> bytes:
    """Return the ids of hashed block hashes as decimal text, a comma after each."""
    messages = np.frombuffer(words, dtype=np.uint64)
    parts = []
    for start in range(0, len(messages), _BATCH):
        batch = messages[start : start + _BATCH]
        text = np.empty((len(batch), ID_BYTES), dtype=np.uint8)
        text[:, -1] = ord(",")
        digest = _siphash(batch, low, high)
        for group in range(4):
            value = (digest >> np.uint64(_GROUP_BITS * group)) & _GROUP_MASK
            least = 1000 if group == 0 else 0
            text[:, 4 * group : 4 * group + 4] = _DIGITS[value.astype(np.intp) + least]
        parts.append(text.tobytes())
    return b"".join(parts)


def _siphash(message: Words, low: int, high: int) -> Words:
    """Return SipHash-2-4 of each word."""
    v0 = np.full(len(message), low ^ 0x736F6D6570736575, dtype=np.uint64)
    v1 = np.full(len(message), high ^ 0x646F72616E646F6D, dtype=np.uint64)
    v2 = np.full(len(message), low ^ 0x6C7967656E657261, dtype=np.uint64)
    v3 = np.full(len(message), high ^ 0x7465646279746573, dtype=np.uint64)
    for word in (message, _MESSAGE_END):
        v3 ^= word
        _rounds(2, v0, v1, v2, v3)
        v0 ^= word
    v2 ^= np.uint64(0xFF)
    _rounds(4, v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


def _rounds(count: int, v0: Words, v1: Words, v2: Words, v3: Words) -> None:
    """Apply SipRound to the state in place."""
    for _ in range(count):
        v0 += v1
        v2 += v3
        _rotate(v1, 13)
        _rotate(v3, 16)
        v1 ^= v0
        v3 ^= v2
        _rotate(v0, 32)
        v2 += v1
        v0 += v3
        _rotate(v1, 17)
        _rotate(v3, 21)
        v1 ^= v2
        v3 ^= v0
        _rotate(v2, 32)


def _rotate(words: Words, bits: int) -> None:
    """Rotate words to the left in place."""
    right = words >> np.uint64(64 - bits)
    words <<= np.uint64(bits)
    words |= right
