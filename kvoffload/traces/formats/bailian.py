"""The format of the Bailian usage traces: Mooncake's with chats, and times in seconds.

Source: the repository alibaba-edu/qwen-bailian-usagetraces-anon and Wang et al., "KVCache Cache in
the Wild" (USENIX ATC'25). `timestamp` is in seconds; a block is 16 tokens; `chat_id` names the
request and `parent_chat_id` the one before it in the conversation, -1 for the first; `type` is its
kind and `turn` its number in the conversation.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import Request

from .base import (
    MAX_SECONDS,
    Format,
    Parser,
    bounded_name,
    field,
    integer,
    integer_ids,
    json_object,
    number,
)

BLOCK_TOKENS = 16
NO_PARENT = (None, -1)


class BailianParser(Parser):
    """A parser of lines in this format; a session is the first chat of its conversation.

    For each chat a 16-byte digest and its session are remembered, so memory is bounded, however
    long names are. The digest is keyed per parser, so that collisions cannot be constructed.
    """

    REMEMBERED = 2**18  # chats whose conversation is remembered; a later turn follows within these

    def __init__(self) -> None:
        self.block_tokens = BLOCK_TOKENS
        self._key = secrets.token_bytes(16)
        self._sessions: dict[bytes, str] = {}

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        row = json_object(line)
        seconds = number(field(row, "timestamp"), "timestamp", MAX_SECONDS)
        input_length = integer(field(row, "input_length"), "input_length")
        output_length = integer(field(row, "output_length"), "output_length")
        hash_ids = integer_ids(row)
        chat = first = _chat(field(row, "chat_id"), "chat_id")
        parent = row.get("parent_chat_id")
        session = None
        if parent not in NO_PARENT:
            first = _chat(parent, "parent_chat_id")
            session = self._sessions.get(self._digest(first))
        if session is None:
            session = bounded_name(first)
        if len(self._sessions) >= self.REMEMBERED:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[self._digest(chat)] = session
        if len(hash_ids) != -(-input_length // BLOCK_TOKENS):
            self.block_tokens = None
        kind, turn = row.get("type"), row.get("turn")
        return Request(
            round(seconds * 1000),
            input_length,
            output_length,
            hash_ids,
            session,
            type=None if kind is None else bounded_name(_chat(kind, "type")),
            turn=None if turn is None else integer(turn, "turn"),
        )

    def _digest(self, chat: str) -> bytes:
        return blake2b(chat.encode(), digest_size=16, key=self._key).digest()


def _chat(value: object, name: str) -> str:
    if type(value) not in (int, str):
        raise BadLineError(f"{name} must be an integer or a string, got {describe(value)}")
    return str(value)


BAILIAN = Format("bailian", BailianParser)
