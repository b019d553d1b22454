"""The form of the Bailian usage traces: as Mooncake's, with chats and with seconds.

Source: the repository alibaba-edu/qwen-bailian-usagetraces-anon and Wang et al., "KVCache Cache in
the Wild" (USENIX ATC'25). `timestamp` is in seconds; a block is 16 tokens; `chat_id` names the
request and `parent_chat_id` the one before it in the conversation, -1 where there is none.
"""

from __future__ import annotations

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import Request

from .base import Form, field, integer, integer_ids, json_object, number

BLOCK_TOKENS = 16
NO_PARENT = (None, -1)


class BailianParser:
    """Parse lines in this form; a request's session is the first chat of its conversation."""

    REMEMBERED = 2**18  # chats whose conversation is remembered; a later turn follows within these

    def __init__(self) -> None:
        self.block_tokens: int | None = BLOCK_TOKENS
        self._sessions: dict[str, str] = {}

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        row = json_object(line)
        seconds = number(field(row, "timestamp"), "timestamp")
        input_length = integer(field(row, "input_length"), "input_length")
        output_length = integer(field(row, "output_length"), "output_length")
        hash_ids = integer_ids(row)
        chat = _chat(field(row, "chat_id"), "chat_id")
        parent = row.get("parent_chat_id")
        if parent in NO_PARENT:
            session = chat
        else:
            name = _chat(parent, "parent_chat_id")
            session = self._sessions.get(name, name)
        if len(self._sessions) >= self.REMEMBERED:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[chat] = session
        if len(hash_ids) != -(-input_length // BLOCK_TOKENS):
            self.block_tokens = None
        timestamp = round(min(seconds, MAX_SECONDS) * 1000)
        return Request(timestamp, input_length, output_length, hash_ids, session)


MAX_SECONDS = 2**53  # beyond, a float has no milliseconds and an integer no use


def _chat(value: object, name: str) -> str:
    if type(value) not in (int, str):
        raise BadLineError(f"{name} must be an integer or a string, got {describe(value)}")
    return str(value)


BAILIAN = Form("bailian", "JSON Lines with chat_id and hash_ids, 16 tokens a block", BailianParser)
