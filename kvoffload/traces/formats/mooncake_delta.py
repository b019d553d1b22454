"""Mooncake's rows that hold only the addition to the session's previous row.

Source: NVIDIA Dynamo 1.4, DynoSim's trace format ``mooncake-delta``, whose prompts are those that
AIPerf 0.13 makes of Mooncake's rows with sessions. A row does not show that it is one; sessions do
whose later rows never repeat their first id. A row without a session is a whole prompt. Else the
prompt is that of the session's previous row, its answer of `output_length` tokens, and the row's
own tokens. An id stands for a block's tokens, the last one perhaps for fewer.

Answers fill blocks only in part, so ids cannot be concatenated as they are: blocks are cut anew,
and the id of one is a hash of its contents and of the block before. Every answer is unique. Only
full blocks have an id.

A session of n rows makes n prompts, each with all before it, and a long answer needs few bytes. So
all prompts together, and the sessions that are held, are bounded by the bytes of the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import Request

from .base import Format
from .mooncake import MooncakeParser

MOST_ID_TOKENS = 2**31 - 1
MOST_BLOCKS = 2**17  # of a session's prompt
MOST_HELD = 2**24  # of all sessions, each counted as SESSION_BLOCKS more: some 128 MiB
SESSION_BLOCKS = 128
FREE_BLOCKS = 2**18  # of all prompts and of all sessions, however small the file is
HELD_PER_BYTE = 64  # of the file, in addition
MADE_PER_BYTE = 256

_ID_BYTES = 8
_SESSION_BYTES = 16
_ANSWER = 1 << 64  # beside the number of a turn: no id


@dataclass(slots=True)
class _Prompt:
    """The prompt of a session so far: its full blocks, and a digest of what follows them."""

    session: bytes  # digest of its name
    ids: array[int] = field(default_factory=lambda: array("Q"))
    rest: blake2b = field(default_factory=lambda: blake2b(digest_size=_ID_BYTES))
    tokens: int = 0
    turns: int = 0
    answer: int = 0  # tokens of the answer to the latest row


class MooncakeDeltaParser(MooncakeParser):
    """A parser of lines in this format.

    `block_tokens` is the number of tokens of an id; `bytes_read` returns the bytes of the file that
    have been read so far.
    """

    def __init__(self, block_tokens: int, bytes_read: Callable[[], int]) -> None:
        super().__init__()
        self._bytes_read = bytes_read
        self.block_tokens: int = block_tokens
        self._prompts: dict[bytes, _Prompt] = {}
        self._held = self._made = 0

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        request = super().__call__(line)
        size = self.block_tokens
        wanted = -(-request.input_length // size)
        if len(request.hash_ids) != wanted:
            rule = (
                f"hash_ids must be {wanted}, one for each {size} tokens of {request.input_length}"
            )
            raise BadLineError(f"{rule}, got {len(request.hash_ids)}")
        name = "" if request.session is None else request.session
        session = blake2b(name.encode(), digest_size=_SESSION_BYTES).digest()
        prompt = self._prompts.get(session) if request.session is not None else None
        prompt = prompt or _Prompt(session)
        tokens = prompt.tokens + prompt.answer + request.input_length
        blocks = tokens // size
        if blocks > MOST_BLOCKS:
            rule = f"a prompt must have at most {MOST_BLOCKS} blocks"
            raise BadLineError(f"{rule}, got {blocks} in session {describe(request.session)}")
        held = self._held + blocks - len(prompt.ids) + (0 if prompt.turns else SESSION_BLOCKS)
        most = min(MOST_HELD, FREE_BLOCKS + HELD_PER_BYTE * self._bytes_read())
        if request.session is not None and held > most:
            rule = f"sessions without a row that `ends` must hold at most {most} blocks"
            raise BadLineError(f"{rule}, got {held}")
        most = FREE_BLOCKS + MADE_PER_BYTE * self._bytes_read()
        if self._made + blocks > most:
            rule = f"the prompts of a file of this size must have at most {most} blocks together"
            raise BadLineError(f"{rule}, got {self._made + blocks}")
        self._made += blocks
        self._add(prompt, _ANSWER | prompt.turns, prompt.answer)
        for start, hash_id in zip(
            range(0, request.input_length, size), request.hash_ids, strict=True
        ):
            self._add(prompt, hash_id, min(size, request.input_length - start))
        prompt.turns += 1
        prompt.answer = request.output_length
        if request.session is not None:
            self._held = held
            self._prompts[session] = prompt
            if request.ends:
                self._held -= blocks + SESSION_BLOCKS
                del self._prompts[session]
        return replace(request, input_length=tokens, hash_ids=tuple(prompt.ids))

    def _add(self, prompt: _Prompt, what: int, tokens: int) -> None:
        """Add tokens of an id, or of an answer, from its first on."""
        start = 0
        while start < tokens:
            free = self.block_tokens - prompt.tokens % self.block_tokens
            end = min(tokens, start + free)
            whose = prompt.session if what & _ANSWER else b""
            prompt.rest.update(b"%d:%d:%d:%b;" % (what, start, end, whose))
            prompt.tokens += end - start
            start = end
            if prompt.tokens % self.block_tokens == 0:
                digest = prompt.rest.digest()
                prompt.ids.append(int.from_bytes(digest, "big") >> 1)
                prompt.rest = blake2b(digest, digest_size=_ID_BYTES)


MOONCAKE_DELTA = Format("mooncake-delta")
