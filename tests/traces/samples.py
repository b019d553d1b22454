"""Rows of all formats; those of logs, one workload as each gateway has it, from ``golden.txt``."""

from __future__ import annotations

import json
from pathlib import Path

UNIX = 1_764_000_000
GOLDEN = Path(__file__).with_name("golden.txt").read_text(encoding="utf-8")


def logs() -> dict[tuple[str, str], list[dict]]:
    """Return the rows of the same chats, by the name of the log and that of the form."""
    found: dict[tuple[str, str], list[dict]] = {}
    for case in f"\n{GOLDEN}".split("\n# log ")[1:]:
        title, *lines = case.partition("\n# ")[0].splitlines()
        name, _, form = title.partition(": ")
        found[name, form] = [json.loads(line) for line in lines if line[:1] == "{"]
    return found


LOGS = logs()

LITELLM_BLOCKS = {
    "call_type": "acompletion",
    "startTime": UNIX,
    "model": "m",
    "session_id": "s",
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "metadata": {"prefix_block_hashes": ["00ff00ff00ff00ff", "0123456789abcdef", "1" * 16]},
}

MOONCAKE = {"timestamp": 1, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 20,
    "output_length": 3,
    "type": "text",
    "turn": 1,
    "hash_ids": [1089, 1090],
}
LMCACHE = {
    "timestamp": 1711929600.123,
    "request_id": "req-001",
    "model_name": "a-model",
    "chunk_size": 256,
    "seq_len": 600,
    "dtypes": ["bfloat16"],
    "shapes": [[2, 32, 256, 1024]],
    "chunk_hashes": ["0xab12", "0xCD34"],
}
DYNAMO = {
    "schema": "dynamo.request.trace.v1",
    "event_type": "request_end",
    "event_time_unix_ms": 1700000009000,
    "agent_context": {"session_id": "s", "parent_session_id": "p", "session_final": True},
    "request": {
        "request_id": "r",
        "output_tokens": 8,
        "request_received_ms": 1700000000000,
        "total_time_ms": 9000.5,
        "replay": {
            "trace_block_size": 64,
            "input_length": 128,
            "input_sequence_hashes": [2**64 - 1, 7],
        },
    },
}
WEKA_REQUEST = {"t": 0.5, "model": "m", "in": 128, "out": 3, "hash_ids": [1, 2], "api_time": 1.5}
WEKA = {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": [WEKA_REQUEST]}
DELTAS = [
    {"session_id": "s", "input_length": 20, "hash_ids": [1, 2]},
    {"session_id": "s", "input_length": 16, "hash_ids": [3]},
]
AGENT = {"type": "subagent", "t": 0, "agent_id": "a", "requests": [WEKA_REQUEST]}
