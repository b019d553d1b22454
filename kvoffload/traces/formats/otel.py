"""Spans of OpenTelemetry: OTLP in JSON, as a collector's file exporter writes it, or one per line.

Source: the OTLP specification of JSON files, and the semantic conventions of generative AI. A line
has `resourceSpans` with many spans, whose attributes are lists of keys and typed values; older
instrumentations write a message per attribute, ``gen_ai.prompt.N.role``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

__all__ = ["INPUT", "flat_span", "spans"]

INPUT = "gen_ai.input.messages"
_LISTED = re.compile(
    r"gen_ai\.prompt\.(\d{1,5})\.(role|content|tool_calls\.\d{1,3}\.(?:name|arguments))"
)
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_VALUES = ("stringValue", "intValue", "doubleValue", "boolValue")


def spans(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the spans of a line, each with its attributes as an object."""
    resources = line.get("resourceSpans", line.get("resource_spans"))
    if not isinstance(resources, list):
        yield flat_span(line)
        return
    for resource in _objects(resources):
        for scope in _objects(resource.get("scopeSpans", resource.get("scope_spans"))):
            for span in _objects(scope.get("spans")):
                yield flat_span(span)


def flat_span(span: dict[str, Any]) -> dict[str, Any]:
    """Return a span whose attributes are an object of plain values."""
    given = span.get("attributes")
    attributes = {}
    if isinstance(given, dict):
        attributes = {**given}
    else:
        for pair in _objects(given):
            if isinstance(pair.get("key"), str):
                attributes[pair["key"]] = _value(pair.get("value"))
    if INPUT not in attributes:
        listed = _messages(attributes)
        if listed:
            attributes[INPUT] = listed
    return {**span, "attributes": attributes}


def _messages(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that have an attribute for each field, and take these out."""
    found: dict[int, dict[str, Any]] = {}
    for name in [name for name in attributes if name.startswith("gen_ai.prompt.")]:
        match = _LISTED.fullmatch(name)
        if match is None:
            continue
        message = found.setdefault(int(match[1]), {"role": "user", "content": ""})
        value = attributes.pop(name)
        if match[2] in ("role", "content"):
            message[match[2]] = value
        else:
            calls = message.setdefault("tool_calls", {})
            _, number, field = match[2].split(".")
            calls.setdefault(int(number), {})[field] = value
    for message in found.values():
        if "tool_calls" in message:
            calls = message["tool_calls"]
            message["tool_calls"] = [calls[number] for number in sorted(calls)]
    return [found[number] for number in sorted(found)]


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
