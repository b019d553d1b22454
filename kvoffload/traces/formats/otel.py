"""Spans of OpenTelemetry: OTLP in JSON, as a collector's file exporter writes it, or one per line.

Source: the OTLP specification of JSON files, the semantic conventions of generative AI, and those
of OpenInference. A line has `resourceSpans` with many spans, whose attributes are lists of keys and
typed values, or `resourceLogs` with log records; the messages may stand in an event of a span.
Older instrumentations and OpenInference write a message per attribute, ``gen_ai.prompt.N.role`` or
``llm.input_messages.N.message.role``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .json_text import unpacked

INPUT = "gen_ai.input.messages"
PREFIXES = ("gen_ai.", "llm.input_messages.")
"""Beginnings of the names of attributes that have prompts."""
OUTPUTS = ("gen_ai.completion.", "llm.output_messages.", "output.value")
"""The same of the answers, which are no part of a prompt."""
RESOURCES = frozenset(
    ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs", "resourceMetrics")
)
TIMES = ("startTimeUnixNano", "start_time_unix_nano", "timeUnixNano")
UNSET = (0, "0")
"""Values of a time that is not known, by the protocol."""
_INNER = (("scopeSpans", "scope_spans", "scopeLogs", "scope_logs"), ("spans", "logRecords"))
_LISTED = re.compile(
    r"(?:gen_ai\.prompt|llm\.input_messages)\.(\d{1,5})\.(?:message\.)?(?:(role|content)|"
    r"(contents)\.\d{1,3}\.message_content\.text|"
    r"tool_calls\.(\d{1,3})\.(?:tool_call\.function\.)?(name|arguments))"
)
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_VALUES = ("stringValue", "intValue", "doubleValue", "boolValue")


def spans(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the spans or log records of a line, each with its attributes as an object."""
    found = [*RESOURCES & line.keys()]
    if not found or not isinstance(line[found[0]], list):
        yield flat_span(line)
        return
    holders = _objects(line[found[0]])
    for names in _INNER:
        holders = [
            inner for holder in holders for name in names for inner in _objects(holder.get(name))
        ]
    yield from map(flat_span, holders)


def flat_span(span: dict[str, Any]) -> dict[str, Any]:
    """Return a span whose attributes are an object of plain values."""
    attributes = _attributes(span)
    if INPUT not in attributes:
        inner = map(_attributes, _objects(span.get("events")))
        event = next((each for each in inner if each.keys() & {INPUT, "gen_ai.prompt"}), None)
        if event is not None:
            attributes = {**event, **attributes}
            span = {**span, "events": None}
    listed = [] if INPUT in attributes else _messages(attributes)
    if listed:
        attributes[INPUT] = listed
    span = {name: value for name, value in span.items() if name not in TIMES or value not in UNSET}
    asked = {name: value for name, value in attributes.items() if not name.startswith(OUTPUTS)}
    return {**span, "attributes": asked}


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    """Return attributes as an object of plain values."""
    given = holder.get("attributes")
    if isinstance(given, dict):
        return {**given}
    pairs = [pair for pair in _objects(given) if isinstance(pair.get("key"), str)]
    return {pair["key"]: _value(pair.get("value")) for pair in pairs}


def _messages(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that have an attribute for each field, and take these out."""
    found: dict[int, dict[str, Any]] = {}
    texts: dict[int, list[object]] = {}
    calls: dict[int, dict[int, dict[str, Any]]] = {}
    for name in [name for name in attributes if name.startswith(("gen_ai.prompt.", PREFIXES[1]))]:
        match = _LISTED.fullmatch(name)
        if match is None:
            continue
        number, field, listed, call, part = match.groups()
        message = found.setdefault(int(number), {"role": "user", "content": ""})
        value = attributes.pop(name)
        if call:
            calls.setdefault(int(number), {}).setdefault(int(call), {})[part] = value
        elif listed:
            texts.setdefault(int(number), []).append(value)
        else:
            message[field] = _parts(value) if field == "content" else value
    for number, its_texts in texts.items():
        content = "\n".join(map(str, [found[number]["content"], *its_texts]))
        found[number]["content"] = content.lstrip("\n")
    for number, its_calls in calls.items():
        found[number]["tool_calls"] = [its_calls[call] for call in sorted(its_calls)]
    return [found[number] for number in sorted(found)]


def _parts(content: object) -> object:
    """Return the parts of a message that are written as a text of JSON; else the content."""
    if not isinstance(content, str) or not content.startswith("[{"):
        return content
    parts = unpacked(content)
    are_parts = all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts)
    return parts if are_parts else content


def _value(value: object) -> Any:
    """Return the plain value of an attribute."""
    if not isinstance(value, dict):
        return value
    for kind in _VALUES:
        if kind in value:
            found = value[kind]
            is_integer = kind == "intValue" and _INTEGER.fullmatch(str(found))
            return int(found) if is_integer else found
    if isinstance(inner := value.get("arrayValue"), dict):
        return [_value(each) for each in _objects(inner.get("values"))]
    if isinstance(inner := value.get("kvlistValue"), dict):
        return {
            str(pair.get("key")): _value(pair.get("value"))
            for pair in _objects(inner.get("values"))
        }
    return None


def _objects(value: object) -> list[dict[str, Any]]:
    """Return the objects of a list, none of another value."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
