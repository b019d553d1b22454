"""Requests that list only what is new since an earlier response, put together to whole prompts.

Source: OpenAI's Responses API. A request with `previous_response_id` goes on from the input and the
output of that response, and one with `conversation` from all that the conversation has. The
instructions are not carried over. A small log can make long prompts that way, so what is held and
what is made are bounded.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvoffload.traces.errors import BadLineError
from kvoffload.traces.prompt_blocks import MARK

from .base import bounded_name
from .conversation import Conversation, Message

if TYPE_CHECKING:
    from .logs import Row

MOST_HELD = 2**25  # characters of all responses together
MOST_MESSAGES = 2**12  # of a prompt
FREE_MADE = 2**24  # characters of whole prompts, however small the log is
MADE_PER_CHARACTER = 64  # of the log, in addition
_MESSAGE = 64  # characters that a message counts for beside its own
_TOKEN = 4  # and a token of a part without text
_BODIES = ("", "request.", "body.", "request.body.")


class History:
    """The messages of earlier responses and conversations, the latest ones, within `MOST_HELD`."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self._known: dict[str, tuple[str, list[Message], dict[str, int], int]] = {}
        self._order: deque[str] = deque()
        self._held = self._seen = self._made = 0
        self._missing = 0  # requests whose response is in no row before

    @property
    def remarks(self) -> list[str]:
        """Continuations that could not be followed, in words."""
        if not self._missing:
            return []
        what = "request continues" if self._missing == 1 else "requests continue"
        text = "a response that no row before has: only what is new of their prompts is read"
        return [f"{self._missing:,} {what} {text}"]

    def whole(
        self, row: Row, messages: list[Message], session: str, marks: dict[str, int]
    ) -> tuple[str, list[Message]]:
        """Return a request's session and all of its messages, and keep them for the next one.

        `marks` are those of the row's parts without text; those of earlier ones are added.
        """
        before = _text(row, "previous_response_id")
        conversation = _text(row, "conversation.id") or _text(row, "conversation")
        key = before or conversation
        answer = self._answer(row)
        new = sum(self._size(message, marks) for message in (*messages, *answer))
        size = new
        if key:
            known = self._known.get(key)
            if known is not None:
                session = session or known[0]
                messages = known[1] + messages
                marks.update(known[2])
                size += known[3]
            elif before:
                self._missing += 1
        session = session or conversation or before
        self._seen += new
        self._made += size
        if len(messages) > MOST_MESSAGES:
            rule = f"a prompt must have at most {MOST_MESSAGES} messages"
            raise BadLineError(f"{rule}, got {len(messages)} with those before")
        most = FREE_MADE + MADE_PER_CHARACTER * self._seen
        if self._made > most:
            rule = f"the prompts of a log of this size must have at most {most} characters together"
            raise BadLineError(f"{rule}, got more")
        named = _text(row, "response.id") or _text(row, "response_id") or _text(row, "id")
        for name in {conversation, named} - {""}:
            self._keep(name, (session or named, messages + answer, marks, size))
        return session or named, messages

    def _answer(self, row: Row) -> list[Message]:
        """Return the messages of a row's answer, none if they are not in the log."""
        for path in ("response.output", "response.body.output", "output"):
            given = row.at(path)
            if isinstance(given, list):
                return self._talk.messages(given, path)
        return []

    def _size(self, message: Message, marks: dict[str, int]) -> int:
        parts = MARK.findall(message["content"]) if marks else ()
        ((role, text),) = self._talk.texts([message], None)  # its calls as well
        return _MESSAGE + len(role + text) + _TOKEN * sum(marks.get(part, 0) for part in parts)

    def _keep(self, name: str, kept: tuple[str, list[Message], dict[str, int], int]) -> None:
        if name in self._known:
            self._held -= self._known[name][3]
        else:
            self._order.append(name)
        self._known[name] = kept
        self._held += kept[3]
        while self._held > MOST_HELD and self._order:
            self._held -= self._known.pop(self._order.popleft())[3]


def _text(row: Row, name: str) -> str:
    """Return a text field of a request, an empty text without it."""
    for body in _BODIES:
        value = row.at(body + name, parsed=False)
        if isinstance(value, str) and value:
            return bounded_name(value)
    return ""
