"""Messages of any API as OpenAI's: a role, a text, and calls of tools.

OpenAI's messages, Anthropic's parts, the items of OpenAI's Responses and the parts of OpenTelemetry
say the same in other fields. A request that is written in any of them makes the same text here, and
so the same blocks. Error messages name fields and types, never values, which hold people's prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvoffload.traces.errors import BadLineError

from .base import kind_of, text_size
from .json_text import packed, unpacked

Message = dict[str, Any]

MOST_UNREAD = 200  # characters of a field that may be left out silently
MOST_DEEP = 8  # parts of messages within parts
PART_KINDS = (
    *("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url"),
    *("file", "input_file", "document", "redacted_thinking", "blob", "uri"),
)
"""Types of parts without text."""
CALLS = ("tool_use", "tool_call", "function_call", "custom_tool_call")
"""Types of parts and of items that call a tool."""
RESULTS = ("tool_result", "tool_call_response", "function_call_output", "custom_tool_call_output")
ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
"""Roles by the type of a message, as LangChain writes them."""
_ARGUMENTS = ("arguments", "input", "args")
_ANSWERS = ("content", "output", "response", "result")
_CONTENTS = ("content", "parts", "text")
_PLAIN = {"role", "content"}
_MESSAGE_FIELDS = _PLAIN | {
    *("name", "reasoning_content", "tool_calls", "function_call", "tool_call_id", "type", "id"),
    *("call_id", "status", "summary", "parts", "encrypted_content", *_ARGUMENTS, *_ANSWERS),
}
_PART_TEXTS = ("text", "thinking", "refusal")
_PART_FIELDS = frozenset(
    ("type", "id", "name", "input", "tool_use_id", "content", "source", "signature", *_PART_TEXTS)
)


class Conversation:
    """A reader of messages and tools.

    `mark` returns the text that stands for a part without text, given the part and its type; `note`
    hears of fields that hold text and are not read.
    """

    def __init__(
        self, mark: Callable[[dict[str, Any], object], str], note: Callable[[str, str], None]
    ) -> None:
        self._mark = mark
        self._note = note

    def messages(self, given: object, name: str) -> list[Message]:
        """Return messages whose content is text, and whose calls have the arguments as values."""
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        if not isinstance(given, list):
            raise BadLineError(f"{name} must be a list of objects, got {kind_of(given)}")
        found: list[Message] = []
        for index, message in enumerate(given):
            if not isinstance(message, dict):
                rule = f"{name}[{index}] must be an object"
                raise BadLineError(f"{rule}, got {kind_of(message)}")
            if (
                message.keys() == _PLAIN
                and type(message["role"]) is type(message["content"]) is str
            ):
                found.append(message)
            else:
                found.extend(self._message(message, f"{name}[{index}]"))
        return found

    def system(self, given: object, name: str) -> list[Message]:
        """Return the message of a system prompt that stands beside the others."""
        content = self._content(given, name)
        return [{"role": "system", "content": content}] if content else []

    def tools(self, given: object, name: str) -> list[Any] | None:
        """Return definitions of tools as OpenAI's; None without any."""
        if not given:
            return None
        if not isinstance(given, list):
            raise BadLineError(f"{name} must be a list, got {kind_of(given)}")
        return [_tool(each) if isinstance(each, dict) else each for each in given]

    def texts(self, messages: list[Message], tools: list[Any] | None) -> list[tuple[str, str]]:
        """Return the parts of a prompt without a template: a role and a text each."""
        found = [("tools", packed(tools))] if tools else []
        for message in messages:
            content = message["content"]
            if len(message) > len(_PLAIN):
                content += self._rest(message)
            found.append((message["role"], content))
        return found

    def _rest(self, message: Message) -> str:
        calls = [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls", ())
        ]
        more = [message[name] for name in ("name", "reasoning_content") if name in message]
        more += [calls] if calls else []
        return packed(more) if more else ""

    def _message(self, message: Message, name: str) -> Iterator[Message]:
        kind, role = message.get("type"), message.get("role")
        if role is None and isinstance(kind, str) and kind != "message":
            yield self._item(message, kind, name)
            return
        if not isinstance(role, str):
            raise BadLineError(f"{name}.role must be a string, got {kind_of(role)}")
        where = next((one for one in _CONTENTS if message.get(one) is not None), "content")
        content, calls = message.get(where), self._calls(message, name)
        unread = MOST_UNREAD if where in message or calls else 0
        for field in message.keys() - _MESSAGE_FIELDS - {where}:
            if text_size(message[field]) > unread:
                self._note("messages[].", field)
        if isinstance(content, list):
            texts: list[str] = []
            for part in content:
                part_kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(part_kind, str) and part_kind.endswith(CALLS):
                    calls.append(self._call(part))
                elif isinstance(part_kind, str) and part_kind.endswith(RESULTS):
                    yield {"role": "tool", "content": self._result(part, f"{name}.{where}")}
                else:
                    texts.append(self._part(part, f"{name}.{where}", 0))
            if content and not texts and not calls:
                return  # only results of tools
            text = "\n".join(texts)
        else:
            text = self._content(content, f"{name}.content")
        found: Message = {"role": role, "content": text}
        for field in ("name", "reasoning_content"):
            if message.get(field) is not None:
                found[field] = message[field]
        if calls:
            found["tool_calls"] = calls
        yield found

    def _item(self, item: Message, kind: str, name: str) -> Message:
        """Return an item of the Responses API, or a message of LangChain's."""
        if kind in CALLS:
            return {"role": "assistant", "content": "", "tool_calls": [self._call(item)]}
        if kind in RESULTS:
            return {"role": "tool", "content": self._result(item, name)}
        if kind in ROLES:
            content = self._content(item.get("content"), f"{name}.content")
            return {"role": ROLES[kind], "content": content}
        if kind == "reasoning":
            content = self._content(item.get("summary") or item.get("content"), f"{name}.summary")
            return {"role": "assistant", "content": content}
        return {"role": "assistant", "content": packed(item)}

    def _calls(self, message: Message, name: str) -> list[Any]:
        calls: list[Any] = []
        for field in ("tool_calls", "function_call"):
            given = message.get(field)
            given = unpacked(given) if isinstance(given, str) else given
            calls += given if isinstance(given, list) else [given] if given else []
        for call in calls:
            if not isinstance(call, dict):
                rule = f"{name}.tool_calls must be a list of objects"
                raise BadLineError(f"{rule}, got {kind_of(call)} in it")
        return [self._call(call) for call in calls]

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the call of a tool as OpenAI's, its arguments as values."""
        function = call.get("function")
        given = function if isinstance(function, dict) else call
        arguments = next((given[name] for name in _ARGUMENTS if name in given), None)
        if isinstance(arguments, str):
            arguments = unpacked(arguments)
        told = {"name": given.get("name"), "arguments": arguments}
        return {"id": call.get("id"), "type": "function", "function": told}

    def _result(self, part: dict[str, Any], name: str) -> str:
        found = next((part[field] for field in _ANSWERS if part.get(field) is not None), None)
        if isinstance(found, dict):
            return packed(found)
        return self._content(found, name, 1)

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
            if part.keys() & _PART_TEXTS and text_size(part[field]) > MOST_UNREAD:
                self._note("messages[].content[].", field)
        for field in _PART_TEXTS:
            if isinstance(part.get(field), str):
                return str(part[field])
        if isinstance(part.get("content"), str) and kind not in PART_KINDS:
            return str(part["content"])
        if isinstance(kind, str) and kind.endswith(CALLS):
            return packed([part.get("name"), part.get("input")])
        if depth < MOST_DEEP:
            if isinstance(source, dict) and source.get("type") in ("text", "content"):
                inner = source.get("data") or source.get("content")
                return self._content(inner, f"{name}.source", depth + 1)
            if kind not in PART_KINDS and (kind in RESULTS or part.get("content")):
                inner = part.get("content")
                if isinstance(inner, dict):
                    return packed(inner)
                return self._content(inner, f"{name}.content", depth + 1)
        return self._mark(part, kind)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the definition of a tool as OpenAI's, if it is one of a function."""
    given = tool.get("function")
    function = given if isinstance(given, dict) else tool
    if not isinstance(function.get("name"), str):
        return tool
    parameters = function.get("input_schema", function.get("parameters"))
    told = {"name": function["name"], "description": function.get("description")}
    told["parameters"] = parameters
    return {
        "type": "function",
        "function": {name: value for name, value in told.items() if value is not None},
    }
