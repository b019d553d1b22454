"""The request trace of Dynamo: JSON Lines of records, one per ended request.

Source: NVIDIA Dynamo 1.4, request traces, schema ``dynamo.request.trace.v1``, which
``DYN_REQUEST_TRACE=1`` writes as ``*.jsonl.gz``. A record of type ``request_end`` has `request` and
there `replay`: the length of the prompt and the hashes of its blocks of `trace_block_size` tokens,
prefix included, the last one perhaps of a partial block. `agent_context` names the session. Times
are Unix times, milliseconds. Records stand in the order in which requests ended. Tool events and
payloads are not read, nor are requests without hashes; both are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import MAX_MILLISECONDS, Request

from .base import Agreed, Format, Parser, field, integer, integer_ids, json_object, number, text
from .mooncake import MAX_WAIT_MS

SCHEMA = "dynamo.request.trace.v1"
REQUEST_END = "request_end"
WITHOUT_HASHES = "requests have no block hashes: they are left out"
OTHERS = "records of tools and payloads are not read"


class DynamoParser(Parser):
    """A parser of lines in this format."""

    def __init__(self) -> None:
        self.start = 0.0
        self._tokens = Agreed()
        self._unread = dict.fromkeys((WITHOUT_HASHES, OTHERS), 0)

    def requests(self, line: bytes) -> Sequence[Request]:
        """Parse a line; other records, and requests without hashes, are counted."""
        row = json_object(line)
        if field(row, "event_type") != REQUEST_END:
            self._unread[OTHERS] += 1
            return ()
        request = _object(field(row, "request"), "request")
        replay = request.get("replay")
        if replay is None:
            self._unread[WITHOUT_HASHES] += 1
            return ()
        return (self._request(row, request, _object(replay, "replay")),)

    def _request(
        self, row: dict[str, Any], request: dict[str, Any], replay: dict[str, Any]
    ) -> Request:
        received = number(
            field(request, "request_received_ms"), "request_received_ms", MAX_MILLISECONDS
        )
        size = integer(field(replay, "trace_block_size"), "trace_block_size", least=1)
        length = integer(field(replay, "input_length"), "input_length")
        hash_ids = integer_ids(replay, "input_sequence_hashes")
        answer, service = request.get("output_tokens"), request.get("total_time_ms")
        context = _object(row.get("agent_context") or {}, "agent_context")
        ends = context.get("session_final")
        if ends is not None and type(ends) is not bool:
            raise BadLineError(f"session_final must be true or false, got {describe(ends)}")
        parsed = Request(
            received,
            length,
            0 if answer is None else integer(answer, "output_tokens"),
            hash_ids,
            _name(context, "session_id"),
            parent=_name(context, "parent_session_id"),
            service=None if service is None else number(service, "total_time_ms", MAX_WAIT_MS),
            ends=bool(ends),
        )
        self.block_tokens = self._tokens.with_one(size)
        return parsed

    @property
    def remarks(self) -> list[str]:
        """Contents of the lines so far that were not read, in words."""
        return [f"{count:,} {what}" for what, count in self._unread.items() if count]


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadLineError(f"{name} must be an object, got {describe(value)}")
    return value


def _name(context: dict[str, Any], name: str) -> str | None:
    value = context.get(name)
    return None if value is None else text(value, name)


DYNAMO = Format("dynamo", DynamoParser, has_hashes=True)
