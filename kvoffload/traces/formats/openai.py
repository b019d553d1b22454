"""Logs of requests to an OpenAI-compatible server: JSON Lines with `messages` or `prompt`.

A line is a request, or holds it as `request` or `body`, as gateways and batch files do; then the
answer is beside it. `prompt` is a text or a list of token ids. The time is that of the first of
`TIMES` that is present: Unix time or ISO 8601. Error messages name fields and types, never values,
which hold people's prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from kvoffload._extras import require
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.prompt_blocks import PromptOptions, check_tokens
from kvoffload.traces.request import MAX_TOKENS, Request

from .base import Format, Parser

TIMES = ("start_time", "timestamp", "created_at", "created", "time", "ts")
SESSIONS = ("session_id", "conversation_id", "user")
WRAPPERS = ("request", "body")
MOST_SECONDS = 10**11  # from here on a time is in milliseconds, and so on
_UNITS = 3  # smaller ones: milliseconds, microseconds, nanoseconds
_NUMBER = re.compile(r"\d{1,20}(?:\.\d{1,20})?", re.ASCII)
_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?"
    r" ?(?:Z|UTC|([+-])(\d\d):?(\d\d)?)?",
    re.ASCII | re.IGNORECASE,
)
_EXTRA_FIELDS = ("name", "reasoning_content", "tool_calls", "function_call", "tool_call_id")
"""Fields of a message that are part of the prompt, beside its role and content."""


class OpenAIParser(Parser):
    """A parser of lines in this format; times are Unix times, milliseconds."""

    def __init__(self, options: PromptOptions | None = None) -> None:
        self._blocks = (options or PromptOptions()).blocks
        self.block_tokens = self._blocks.block_tokens
        self._is_timed: bool | None = None  # as the first line shows
        msgspec = require("msgspec", "reading a trace")
        self._decode = msgspec.json.Decoder().decode
        self._encode = msgspec.json.Encoder().encode
        self._faults = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        try:
            row = self._decode(line)
        except self._faults:
            found = f"got {len(line)} bytes that are none"
            raise BadLineError(f"must be a JSON object, {found}") from None
        if not isinstance(row, dict):
            raise BadLineError(f"must be a JSON object, got {kind_of(row)}")
        body = request_of(row)
        if body is None:
            raise BadLineError("must have the field messages or prompt, got neither")
        holders = list(_holders(row, body))
        seconds = _seconds(holders)
        if self._is_timed is not None and self._is_timed != (seconds is not None):
            rule = "must have a time as the first request has, got none"
            if seconds is not None:
                rule = "must have no time as the first request has none, got one"
            raise BadLineError(rule)
        model = _optional_text([body, row], "model") or ""
        output = _output(holders)
        session = next(filter(None, (_optional_text(holders, name) for name in SESSIONS)), None)
        length, hash_ids = self._prompt(body, model, seconds or 0.0)
        self._is_timed = seconds is not None
        if seconds is None:
            self._blocks.is_untimed = True
        else:
            self.start = 0.0
        return Request(
            round(1000 * (seconds or 0.0)),
            length,
            output,
            hash_ids,
            None if session is None else self._blocks.session(session),
        )

    def _prompt(
        self, body: dict[str, Any], model: str, seconds: float
    ) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of a request's prompt and the ids of its blocks."""
        if "messages" in body:
            messages = self._messages(body["messages"])
            tools = body.get("tools")
            if tools is not None and not isinstance(tools, list):
                raise BadLineError(f"tools must be a list, got {kind_of(tools)}")
            if self._blocks.has_template:
                text = self._blocks.render(list(map(self._plain, messages)), tools, seconds)
                return self._blocks.of_text(text, model, special=False)
            return self._blocks.of_text(self._joined(messages, tools), model, special=True)
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._blocks.of_text(prompt, model, special=True)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return self._blocks.of_tokens(check_tokens(prompt, "prompt"), model)
        found = kind_of(prompt)
        if isinstance(prompt, list):
            found = f"a list with {kind_of(next(t for t in prompt if type(t) is not int))}"
        raise BadLineError(f"prompt must be a text or a list of token ids, got {found}")

    def _messages(self, given: object) -> list[dict[str, Any]]:
        """Return messages whose content is text."""
        if not isinstance(given, list):
            raise BadLineError(f"messages must be a list of objects, got {kind_of(given)}")
        messages = []
        for index, message in enumerate(given):
            name = f"messages[{index}]"
            if not isinstance(message, dict):
                raise BadLineError(f"{name} must be an object, got {kind_of(message)}")
            role = message.get("role")
            if not isinstance(role, str):
                raise BadLineError(f"{name}.role must be a string, got {kind_of(role)}")
            content = message.get("content")
            if isinstance(content, list):
                content = "\n".join(self._part(part, f"{name}.content") for part in content)
            elif content is not None and not isinstance(content, str):
                rule = f"{name}.content must be a text or a list of parts"
                raise BadLineError(f"{rule}, got {kind_of(content)}")
            messages.append({**message, "content": content or ""})
        return messages

    def _part(self, part: object, name: str) -> str:
        """Return the text of a part of a message; for another kind, a mark of its content."""
        if isinstance(part, str):
            return part
        if not isinstance(part, dict):
            raise BadLineError(f"{name} must be a list of texts and objects, got {kind_of(part)}")
        text = part.get("text")
        if isinstance(text, str):
            return text
        return f"<{self._blocks.digest(self._encode(part))}>"

    def _plain(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message as templates expect it: arguments of tools as objects."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        return {**message, "tool_calls": [self._plain_call(call) for call in calls]}

    def _plain_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return call
        try:
            arguments = self._decode(function["arguments"])
        except self._faults:
            return call
        return {**call, "function": {**function, "arguments": arguments}}

    def _joined(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return the prompt without a template: tools, then role and text."""
        parts = [self._encode(tools).decode() + "\n"] if tools else []
        for message in messages:
            more = [message[name] for name in _EXTRA_FIELDS if message.get(name) is not None]
            told = self._encode(more).decode() if more else ""
            parts.append(f"{message['role']}\n{message['content']}{told}\n")
        return "".join(parts)


def request_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request with `messages` or `prompt` that a line is or holds, None without."""
    for body in (row, *(row.get(name) for name in WRAPPERS)):
        if isinstance(body, dict) and ("messages" in body or "prompt" in body):
            return body
    return None


def kind_of(value: object) -> str:
    """Return the type of a JSON value in words, without the value."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object", type(None): "null or nothing"}
    return names[type(value)]


def _holders(row: dict[str, Any], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects that may hold a request's time and answer."""
    yield row
    if body is not row:
        yield body
    response = row.get("response")
    if isinstance(response, dict):
        yield response
        inner = response.get("body")  # of a batch
        if isinstance(inner, dict):
            yield inner


def _seconds(holders: list[dict[str, Any]]) -> float | None:
    """Return the Unix time of a request, None if no field states it."""
    for holder in holders:
        for name in TIMES:
            value = holder.get(name)
            if value is not None:
                return _unix(value, name)
    return None


def _unix(value: object, name: str) -> float:
    """Return a time as Unix time, seconds."""
    if isinstance(value, str):
        text = value.strip()
        value = float(text) if _NUMBER.fullmatch(text) else _iso(text)
    if type(value) in (int, float):
        seconds: float = value  # type: ignore[assignment]
        for _ in range(_UNITS):
            if seconds >= MOST_SECONDS:
                seconds /= 1000
        if 0 <= seconds < MOST_SECONDS:
            return float(seconds)
    elif isinstance(value, datetime):
        return max(0.0, value.timestamp())
    found = kind_of(value)
    if type(value) in (int, float, str):
        found = "another string" if isinstance(value, str) else "another number"
    raise BadLineError(f"{name} must be Unix time or a time as in ISO 8601, got {found}")


def _iso(text: str) -> datetime | str:
    """Return the time of a text as in ISO 8601, UTC if it names no zone, else the text."""
    match = _ISO.fullmatch(text)
    if match is None:
        return text
    year, month, day, hour, minute = map(int, match.groups()[:5])
    second, fraction = int(match[6] or 0), int((match[7] or "0").ljust(6, "0")[:6])
    away = timedelta(hours=int(match[9] or 0), minutes=int(match[10] or 0))
    zone = timezone.utc
    try:
        if match[8]:
            zone = timezone(-away if match[8] == "-" else away)
        return datetime(year, month, day, hour, minute, second, fraction, zone)
    except ValueError:
        return text


def _output(holders: list[dict[str, Any]]) -> int:
    """Return the tokens of the answer, 0 if they are not known."""
    for holder in holders:
        usage = holder.get("usage")
        if isinstance(usage, dict) and usage.get("completion_tokens") is not None:
            tokens = usage["completion_tokens"]
            if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS:
                rule = "usage.completion_tokens must be an integer >= 0"
                raise BadLineError(f"{rule}, got {_found(tokens)}")
            return tokens
    return 0


def _optional_text(holders: list[dict[str, Any]], name: str) -> str | None:
    """Return a field that must be a text, or a number, if it is there."""
    for holder in holders:
        value = holder.get(name)
        if value is not None:
            if type(value) not in (str, int):
                raise BadLineError(f"{name} must be a string, got {kind_of(value)}")
            return str(value)
    return None


def _found(value: object) -> str:
    return "another integer" if type(value) is int else kind_of(value)


OPENAI = Format(
    "openai",
    "JSON Lines of requests with messages or prompt, as an OpenAI-compatible server takes them",
    OpenAIParser,
    has_hashes=True,
)
