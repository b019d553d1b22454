"""Chats as each gateway logs them: one workload in every format of logs.

To add a format, write its rows here; what is tested of logs then holds for it.
"""

from __future__ import annotations

import json
import random
from datetime import datetime, timezone

UNIX = 1_764_000_000
WORDS = [
    *("der", "größe", "naïve", "缓存", "token", "block", "answer", "user", "server", "disk", "why"),
    *("please", "𝔘nicode"),
]


def chats(count=40, seed=3):
    """Return requests in the order of their times, in OpenAI's form."""
    rng = random.Random(seed)

    def text(least, most):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    tools = [
        {
            "type": "function",
            "function": {
                "name": f"search_{number}",
                "description": text(20, 30),
                "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
            },
        }
        for number in range(3)
    ]
    applications = [(text(150, 200), tools[: number + 1], f"model-{number}") for number in range(2)]
    found = []
    while len(found) < count:
        system, its_tools, model = rng.choice(applications)
        time, messages, session = rng.randint(0, 9000), [], f"session {len(found)}"
        for _ in range(rng.randint(1, 4)):
            content = text(10, 60)
            if rng.random() < 0.2:
                picture = {
                    "type": "image_url",
                    "image_url": {"url": "data:" + rng.randbytes(90).hex()},
                }
                content = [{"type": "text", "text": content}, picture]
            messages = [*messages, {"role": "user", "content": content}]
            found.append(chat(time, session, model, system, its_tools, messages, rng))
            if rng.random() < 0.4:
                call = {"name": its_tools[0]["function"]["name"], "arguments": '{"q": "why"}'}
                calls = [{"id": "c1", "type": "function", "function": call}]
                messages = [
                    *messages,
                    {"role": "assistant", "content": None, "tool_calls": calls},
                    {"role": "tool", "tool_call_id": "c1", "content": text(20, 80)},
                ]
                time += 2
                found.append(chat(time, session, model, system, its_tools, messages, rng))
            messages = [*messages, {"role": "assistant", "content": text(10, 40)}]
            time += rng.randint(5, 90)
    return sorted(found, key=lambda one: one["time"])


def chat(time, session, model, system, tools, messages, rng):
    return {
        "time": UNIX + time,
        "session": session,
        "model": model,
        "system": system,
        "tools": tools,
        "messages": messages,
        "output": rng.randint(1, 99),
    }


def iso(time):
    return datetime.fromtimestamp(time, timezone.utc).isoformat().replace("+00:00", "Z")


def whole(one):
    """Return all messages of a chat, the system prompt first."""
    return [{"role": "system", "content": one["system"]}, *one["messages"]]


def body(one):
    return {"model": one["model"], "messages": whole(one), "tools": one["tools"]}


def openai(one):
    usage = {"prompt_tokens": 9, "completion_tokens": one["output"]}
    row = {"timestamp": iso(one["time"]), "session_id": one["session"], "request": body(one)}
    return row | {"response": {"choices": [], "usage": usage}}


def batch(one):
    response = {"status_code": 200, "body": {"created": one["time"], "usage": {}}}
    response["body"]["usage"]["completion_tokens"] = one["output"]
    row = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "response": response}
    return row | {"body": body(one) | {"user": one["session"]}}


def anthropic(one):
    def content(message):
        if message["role"] == "tool":
            return [{"type": "tool_result", "tool_use_id": "c1", "content": message["content"]}]
        calls = [
            {"type": "tool_use", "id": "c1", "name": call["function"]["name"]}
            | {"input": json.loads(call["function"]["arguments"])}
            for call in message.get("tool_calls", ())
        ]
        if calls:
            return calls
        if isinstance(message["content"], str):
            return message["content"]
        text, picture = message["content"]
        data = picture["image_url"]["url"]
        return [text, {"type": "image", "source": {"type": "base64", "data": data}}]

    tools = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in one["tools"]
    ]
    messages = [
        {"role": {"tool": "user"}.get(each["role"], each["role"]), "content": content(each)}
        for each in one["messages"]
    ]
    system = [{"type": "text", "text": one["system"], "cache_control": {"type": "ephemeral"}}]
    request = {"model": one["model"], "max_tokens": 9, "system": system, "tools": tools}
    request |= {"messages": messages, "metadata": {"user_id": one["session"]}}
    usage = {"input_tokens": 1, "cache_read_input_tokens": 5, "output_tokens": one["output"]}
    return {"created_at": iso(one["time"]), "request": request, "response": {"usage": usage}}


def items(messages):
    """Return messages as items of the Responses API."""
    found = []
    for message in messages:
        if message["role"] == "tool":
            item = {"type": "function_call_output", "call_id": "c1", "output": message["content"]}
        elif message.get("tool_calls"):
            function = message["tool_calls"][0]["function"]
            item = {"type": "function_call", "call_id": "c1", **function}
        else:
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            parts = [{"type": kind, "text": parts[0]["text"]}, *parts[1:]]
            item = {"type": "message", "role": message["role"], "content": parts}
        found.append(item)
    return found


def responses(one):
    tools = [{"type": "function", **tool["function"]} for tool in one["tools"]]
    request = {"model": one["model"], "instructions": one["system"], "tools": tools}
    request["input"] = items(one["messages"])
    usage = {"output_tokens": one["output"]}
    row = {"created_at": one["time"], "user": one["session"], "body": request}
    return row | {"response": {"usage": usage}}


def litellm(one):
    return {
        "id": "chatcmpl-1",
        "trace_id": one["session"],
        "call_type": "acompletion",
        "startTime": one["time"] + 0.0,
        "endTime": one["time"] + 2.5,
        "model": one["model"],
        "messages": whole(one),
        "model_parameters": {"tools": one["tools"], "max_tokens": 400},
        "completion_tokens": one["output"],
        "response": {"choices": [{"message": {"content": "x" * 300}}]},
    }


def spend_logs(one):
    return {
        "request_id": "chatcmpl-1",
        "call_type": "acompletion",
        "startTime": iso(one["time"]).removesuffix("Z"),
        "model": one["model"],
        "user": "",
        "end_user": "customer",
        "session_id": one["session"],
        "metadata": "{}",
        "messages": json.dumps(whole(one)),
        "proxy_server_request": json.dumps({"tools": one["tools"]}),
        "completion_tokens": one["output"],
        "response": json.dumps({"choices": []}),
    }


def langfuse(one):
    return {
        "id": "o",
        "traceId": "t",
        "sessionId": one["session"],
        "type": "GENERATION",
        "startTime": iso(one["time"]),
        "model": one["model"],
        "input": {"messages": whole(one), "tools": one["tools"]},
        "output": {"role": "assistant", "content": "x" * 300},
        "usageDetails": {"input": 1, "output": one["output"]},
    }


def langfuse_page(one):
    return {"data": [langfuse(one)], "meta": {"page": 1, "limit": 50, "totalItems": 1}}


def langfuse_export(one):
    return {
        "id": "o",
        "trace_id": "t",
        "session_id": one["session"],
        "type": "GENERATION",
        "start_time": iso(one["time"]).replace("T", " ").replace("Z", ".000000"),
        "provided_model_name": one["model"],
        "input": json.dumps({"messages": whole(one), "tools": one["tools"]}),
        "usage_details": {"output": one["output"]},
    }


def helicone(one):
    return {
        "request_id": "h",
        "request_created_at": iso(one["time"]),
        "request_body": body(one),
        "response_body": {"choices": []},
        "request_properties": {"Helicone-Session-Id": one["session"]},
        "completion_tokens": one["output"],
    }


def openrouter(one):
    return {
        "generation_id": "gen-1",
        "created_at": iso(one["time"]),
        "model": one["model"],
        "session_id": one["session"],
        "input": {"messages": whole(one), "tools": one["tools"]},
        "native_tokens_completion": one["output"],
    }


def parts(message):
    """Return the parts of a message as OpenTelemetry has them."""
    if message["role"] == "tool":
        return [{"type": "tool_call_response", "id": "c1", "response": message["content"]}]
    if message.get("tool_calls"):
        function = message["tool_calls"][0]["function"]
        arguments = json.loads(function["arguments"])
        call = {"type": "tool_call", "id": "c1", "name": function["name"], "arguments": arguments}
        return [call]
    content = message["content"]
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    blob = {"type": "blob", "modality": "image", "content": content[1]["image_url"]["url"]}
    return [{"type": "text", "content": content[0]["text"]}, blob]


def attributes(one):
    messages = [{"role": each["role"], "parts": parts(each)} for each in one["messages"]]
    tools = [{"type": "function", **tool["function"]} for tool in one["tools"]]
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": one["model"],
        "gen_ai.conversation.id": one["session"],
        "gen_ai.usage.output_tokens": one["output"],
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": one["system"]}]),
        "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.tool.definitions": json.dumps(tools),
    }


def span(one):
    nanoseconds = str(one["time"] * 10**9)
    return {"traceId": "0", "spanId": "0", "name": "chat", "startTimeUnixNano": nanoseconds}


def otel(one):
    return span(one) | {"attributes": attributes(one)}


def otlp(one):
    """Return a line of a collector's file: two spans, one of them of a tool."""
    pairs = [
        {
            "key": key,
            "value": {"intValue": str(value)} if type(value) is int else {"stringValue": value},
        }
        for key, value in attributes(one).items()
    ]
    tool = {"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}}
    spans = [span(one) | {"attributes": [tool]}, span(one) | {"attributes": pairs}]
    return {"resourceSpans": [{"scopeSpans": [{"scope": {}, "spans": spans}]}]}


LOGS = {
    "openai": (openai, batch),
    "anthropic": (anthropic,),
    "responses": (responses,),
    "litellm": (litellm, spend_logs),
    "langfuse": (langfuse, langfuse_export, langfuse_page),
    "helicone": (helicone,),
    "openrouter": (openrouter,),
    "otel": (otel, otlp),
}
"""What makes a row of a chat, by format."""

LITELLM_BLOCKS = {
    "call_type": "acompletion",
    "startTime": UNIX,
    "model": "m",
    "session_id": "s",
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "metadata": {"prefix_block_hashes": ["00ff00ff00ff00ff", "0123456789abcdef", "1" * 16]},
}
