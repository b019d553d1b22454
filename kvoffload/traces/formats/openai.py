"""Logs of requests to an OpenAI-compatible server: JSON Lines with `messages` or `prompt`.

A line is a request, or holds it in one of `WRAPPERS`, as gateways and batch files do; then the
answer is beside it. `prompt` is a text or a list of token ids. Anthropic's `system` stands before
the messages, and LiteLLM's payloads and spend logs are read, which keep tools in
`model_parameters` or `proxy_server_request`, and text that holds JSON. The time is that of the
first of `TIMES` that is present: Unix time or ISO 8601. Error messages name fields and types, never
values, which hold people's prompts.

Nothing that could be a prompt is dropped silently: fields that are not read are counted by name if
they hold text, and parts of messages without text count as `tokens_per_image` tokens.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from kvoffload._extras import require
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.prompt_blocks import PromptOptions, check_tokens
from kvoffload.traces.request import MAX_TOKENS, Request

from .base import Format, Parser

TIMES = ("start_time", "startTime", "timestamp", "created_at", "created", "time", "ts")
SESSIONS = ("session_id", "conversation_id", "end_user", "user", "user_id")
WRAPPERS = ("request", "body", "proxy_server_request")
BESIDE = ("model_parameters", "proxy_server_request")
"""Fields beside a request's messages that hold its tools and system prompt."""
ANSWERS = ("response", "choices", "output", "completion", "response_body", "usage")
PROMPTS = (
    *("messages", "prompt", "system", "system_prompt", "system_instruction", "instructions"),
    *("input", "contents", "tools", "functions", "documents", "suffix"),
)
"""Fields of which some API makes a prompt."""
MOST_SECONDS = 10**11  # from here on a time is in milliseconds, and so on
MOST_UNREAD = 200  # characters of a field that may be left out silently
MOST_LEVELS = 2  # of objects within a row in which a field is named
MOST_NAMED = 50  # fields that are not read
MOST_PART_TOKENS = 2**20  # of a request's parts without text
MOST_DEEP = 8  # parts of messages within parts
_MOST_TIME = 10**21  # any unit
_UNITS = 3  # smaller ones: milliseconds, microseconds, nanoseconds
_NUMBER = re.compile(r"\d{1,20}(?:\.\d{1,20})?", re.ASCII)
_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?"
    r" ?(?:Z|UTC|([+-])(\d\d):?(\d\d)?)?",
    re.ASCII | re.IGNORECASE,
)
_FIELD = re.compile(r"[\w\-]{1,40}")
_EXTRA_FIELDS = ("name", "reasoning_content", "tool_calls", "function_call", "tool_call_id")
"""Fields of a message that are part of the prompt, beside its role and content."""
_MESSAGE_FIELDS = frozenset(("role", "content", *_EXTRA_FIELDS))
_PART_TEXTS = ("text", "thinking", "refusal")
_PART_FIELDS = frozenset(
    ("type", "id", "name", "input", "tool_use_id", "content", "source", "signature", *_PART_TEXTS)
)


class OpenAIParser(Parser):
    """A parser of lines in this format; times are Unix times, milliseconds."""

    def __init__(self, options: PromptOptions | None = None) -> None:
        self._blocks = (options or PromptOptions()).blocks
        self.block_tokens = self._blocks.block_tokens
        self._is_timed: bool | None = None  # as the first line shows
        self._unread: Counter[str] = Counter()  # rows by field
        self._marks: dict[str, int] = {}  # of the row's parts without text: their tokens
        self._part_tokens = 0
        self._row_unread: dict[str, None] = {}
        msgspec = require("msgspec", "reading a trace")
        self._decode = msgspec.json.Decoder().decode
        self._encode = msgspec.json.Encoder().encode
        self._faults = (msgspec.MsgspecError, UnicodeError, RecursionError)

    def __call__(self, line: bytes) -> Request:
        """Parse a line."""
        try:
            return self._parse(line)
        except RecursionError:
            raise BadLineError("must be nested less deeply, got more lists and objects") from None

    def _parse(self, line: bytes) -> Request:
        row = self._decoded(line)
        if not isinstance(row, dict):
            raise BadLineError(f"must be a JSON object, got {kind_of(row)}")
        for name in (*WRAPPERS, *BESIDE, "messages", "metadata", "response"):
            if name in row:
                row[name] = self._unpacked(row[name])
        body = request_of(row)
        if body is None:
            raise BadLineError("must have the field messages or prompt, got neither")
        self._marks, self._row_unread, self._part_tokens = {}, {}, 0
        holders = list(_holders(row, body))
        seconds = _seconds(holders)
        if self._is_timed is not None and self._is_timed != (seconds is not None):
            rule = "must have a time as the first request has, got none"
            if seconds is not None:
                rule = "must have no time as the first request has none, got one"
            raise BadLineError(rule)
        model = _optional_text([body, row], "model") or ""
        output = _output(holders)
        session = _session(row, holders)
        length, hash_ids = self._prompt(row, body, model, seconds or 0.0)
        self._is_timed = seconds is not None
        if seconds is None:
            self._blocks.is_untimed = True
        else:
            self.start = 0.0
        for name in self._row_unread:
            if name in self._unread or len(self._unread) < MOST_NAMED:
                self._unread[name] += 1
        return Request(
            round(1000 * (seconds or 0.0)),
            length,
            output,
            hash_ids,
            None if session is None else self._blocks.session(session),
        )

    @property
    def remarks(self) -> list[str]:
        """Fields of the lines so far that hold text and are not read, in words."""
        return [
            f"{count:,} row{'s have' if count > 1 else ' has'} text in `{name}` that is not read"
            for name, count in self._unread.items()
        ]

    def _decoded(self, line: bytes) -> Any:
        """Decode a line; half a pair of surrogates, which is no text but occurs, is kept."""
        try:
            return self._decode(line)
        except self._faults:
            pass
        try:
            return json.loads(line.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            found = f"got {len(line)} bytes that are none"
            raise BadLineError(f"must be a JSON object, {found}") from None

    def _unpacked(self, value: Any) -> Any:
        """Return the list or object that a text holds, else the value."""
        if isinstance(value, str) and value.startswith(("{", "[")):
            try:
                return self._decode(value)
            except self._faults:
                return value
        return value

    def _packed(self, value: Any) -> str:
        """Return a value as JSON."""
        try:
            text: str = self._encode(value).decode()
        except UnicodeError:
            text = json.dumps(value)
        return text

    def _prompt(
        self, row: dict[str, Any], body: dict[str, Any], model: str, seconds: float
    ) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of a request's prompt and the ids of its blocks."""
        is_chat = body.get("messages") is not None or "prompt" not in body
        read = {"messages" if is_chat else "prompt"}
        beside = [body, *_beside(row)]
        if is_chat:
            tools = next((found for each in beside if (found := each.get("tools"))), None)
            tools = tools or body.get("functions")
            if tools is not None and not isinstance(tools, list):
                raise BadLineError(f"tools must be a list, got {kind_of(tools)}")
            system = next((found for each in beside if (found := each.get("system"))), None)
            read |= {"tools", "functions", "system"}
            messages = self._messages(self._unpacked(body["messages"]), system)
        self._note_unread(row, body, read)
        if is_chat:
            if self._blocks.has_template:
                text = self._blocks.render(list(map(self._plain, messages)), tools, seconds)
                return self._blocks.of_text(text, model, special=False, marks=self._marks)
            text = self._joined(messages, tools)
            return self._blocks.of_text(text, model, special=True, marks=self._marks)
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

    def _note_unread(self, row: dict[str, Any], body: dict[str, Any], read: set[str]) -> None:
        """Note the fields of a row that hold text and are not read."""
        self._note_fields(body, "", read | ({*BESIDE} if body is row else set()))
        if body is not row:
            wrappers = [
                name
                for name in WRAPPERS
                if isinstance(value := row.get(name), dict)
                and any(each is body for each in (value, value.get("body")))
            ]
            self._note_fields(row, "", {*BESIDE, *wrappers})
        for each in _beside(row):
            if each is not body:
                self._note_fields(each, "", {*read, "messages", "prompt", "body"})

    def _note_fields(self, holder: dict[str, Any], path: str, read: set[str]) -> None:
        for name, value in holder.items():
            if name in read or name in ANSWERS:
                continue
            if name in PROMPTS:
                if _text_size(value):
                    self._note(path, name)
            elif isinstance(value, dict) and path.count(".") < MOST_LEVELS:
                inner = name if _FIELD.fullmatch(name) else "…"
                self._note_fields(value, f"{path}{inner}.", set())
            elif _text_size(value) > MOST_UNREAD:
                self._note(path, name)

    def _note(self, path: str, name: str) -> None:
        if len(self._row_unread) < MOST_NAMED:
            self._row_unread[path + (name if _FIELD.fullmatch(name) else "…")] = None

    def _messages(self, given: object, system: object) -> list[dict[str, Any]]:
        """Return messages whose content is text; the system prompt first, if there is one."""
        if not isinstance(given, list):
            raise BadLineError(f"messages must be a list of objects, got {kind_of(given)}")
        messages = []
        if system is not None:
            content = self._content(system, "system")
            messages.append({"role": "system", "content": content})
        for index, message in enumerate(given):
            name = f"messages[{index}]"
            if not isinstance(message, dict):
                raise BadLineError(f"{name} must be an object, got {kind_of(message)}")
            role = message.get("role")
            if not isinstance(role, str):
                raise BadLineError(f"{name}.role must be a string, got {kind_of(role)}")
            content = self._content(message.get("content"), f"{name}.content")
            for field in message.keys() - _MESSAGE_FIELDS:
                if _text_size(message[field]) > MOST_UNREAD:
                    self._note("messages[].", field)
            messages.append({**message, "content": content})
        return messages

    def _content(self, content: object, name: str, depth: int = 0) -> str:
        """Return the text of a message's content."""
        if isinstance(content, list):
            return "\n".join(self._part(part, name, depth) for part in content)
        if content is not None and not isinstance(content, str):
            rule = f"{name} must be a text or a list of parts"
            raise BadLineError(f"{rule}, got {kind_of(content)}")
        return content or ""

    def _part(self, part: object, name: str, depth: int) -> str:
        """Return the text of a part of a message; for another kind, a mark of its content."""
        if isinstance(part, str):
            return part
        if not isinstance(part, dict):
            raise BadLineError(f"{name} must be a list of texts and objects, got {kind_of(part)}")
        kind, source = part.get("type"), part.get("source")
        for field in part.keys() - _PART_FIELDS:
            if part.keys() & _PART_TEXTS and _text_size(part[field]) > MOST_UNREAD:
                self._note("messages[].content[].", field)
        for field in _PART_TEXTS:
            if isinstance(part.get(field), str):
                return str(part[field])
        if isinstance(kind, str) and kind.endswith("tool_use"):
            return self._packed([part.get("name"), part.get("input")])
        if depth < MOST_DEEP:
            if kind == "tool_result" or part.get("content"):
                return self._content(part.get("content"), f"{name}.content", depth + 1)
            if isinstance(source, dict) and source.get("type") in ("text", "content"):
                inner = source.get("data") or source.get("content")
                return self._content(inner, f"{name}.source", depth + 1)
        return self._mark(part, kind)

    def _mark(self, part: dict[str, Any], kind: object) -> str:
        """Return the mark of a part without text, and note its tokens."""
        data = self._packed(part).encode("utf-8", "surrogatepass")
        mark = f"<{self._blocks.digest(data)}>"
        tokens = self._marks[mark] = self._blocks.part_tokens(kind, len(data))
        self._part_tokens += tokens
        if self._part_tokens > MOST_PART_TOKENS:
            rule = f"parts without text must have at most {MOST_PART_TOKENS} tokens together"
            raise BadLineError(f"{rule}, got more")
        return mark

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
        parts = [self._packed(tools) + "\n"] if tools else []
        for message in messages:
            more = [message[name] for name in _EXTRA_FIELDS if message.get(name) is not None]
            told = self._packed(more) if more else ""
            parts.append(f"{message['role']}\n{message['content']}{told}\n")
        return "".join(parts)


def request_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request with `messages` or `prompt` that a line is or holds, None without.

    Of several, the first one whose messages are a list.
    """
    inside = [row.get(name) for name in WRAPPERS]
    inside += [value.get("body") for value in inside if isinstance(value, dict)]
    found = [
        body
        for body in (row, *inside)
        if isinstance(body, dict) and ("messages" in body or "prompt" in body)
    ]
    lists = (body for body in found if isinstance(body.get("messages"), list))
    return next(lists, found[0] if found else None)


def kind_of(value: object) -> str:
    """Return the type of a JSON value in words, without the value."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object", type(None): "null or nothing"}
    return names[type(value)]


def _text_size(value: object) -> int:
    """Return the characters of the longest text in a value; those in a list count together."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_text_size, value))
    if isinstance(value, dict):
        return max(map(_text_size, value.values()), default=0)
    return 0


def _beside(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects beside a request's messages that hold its tools and system prompt."""
    found = [row.get(name) for name in BESIDE]
    found += [value.get("body") for value in found if isinstance(value, dict)]
    return [value for value in found if isinstance(value, dict)]


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


def _session(row: dict[str, Any], holders: list[dict[str, Any]]) -> str | None:
    """Return the name of a request's session, None if no field states it."""
    places = [*holders]
    for holder in holders:
        metadata = holder.get("metadata")
        if isinstance(metadata, dict):  # of any content
            places.append({k: v for k, v in metadata.items() if type(v) in (str, int)})
    names: tuple[str, ...] = SESSIONS
    if "call_type" in row:  # LiteLLM's, where it groups requests; elsewhere each has its own
        names = (*names[:2], "trace_id", *names[2:])
    return next(filter(None, (_optional_text(places, name) for name in names)), None)


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
    if type(value) in (int, float) and value < _MOST_TIME:  # type: ignore[operator]
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
    usages = [(holder.get("usage"), "usage.") for holder in holders]
    for usage, path in (*usages, (holders[0], "")):
        if not isinstance(usage, dict):
            continue
        for name in ("completion_tokens", "output_tokens"):
            tokens = usage.get(name)
            if tokens is None:
                continue
            if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS:
                rule = f"{path}{name} must be an integer >= 0"
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
