"""What a small file takes, in every format: its bytes, and little more, however it is made."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("memory is read as Linux shows it", allow_module_level=True)

from kvoffload._extras import require
from kvoffload.traces.formats import FORMATS, LOG_FORMATS
from kvoffload.traces.lines import zstd_module
from kvoffload.traces.objects import OBJECTS
from kvoffload.traces.oracle_general import ORACLE_GENERAL
from tests.isolated.scripts import run_python
from tests.traces.samples import (
    BAILIAN,
    DYNAMO,
    LITELLM_BLOCKS,
    LMCACHE,
    MOONCAKE,
    WEKA,
    WEKA_REQUEST,
)

MOST_BYTES = 11_000  # of the file
MOST_MEMORY = 50  # MiB
MOST_WRITTEN = 32  # bytes per byte of what the file unpacks to
ONE_LINE = 2**19  # bytes that are accepted in one line of a small file
UNPACKED = 8 * 2**20  # if it is packed to that size

READ = """
import sys
from pathlib import Path
from kvoffload.traces import PromptOptions, Survey, Trace, TraceError
from kvoffload.traces.writer import trace_line
import msgspec, kvoffload.traces.scratch, {preload}
from {zstd} import ZstdFile
fields = dict(time="t", prompt="p")
def status(name):
    return int(Path("/proc/self/status").read_text().split(name)[1].split()[0]) >> 10
before = status("VmRSS:")
written = 0
def counted(requests):
    global written
    for request in requests:
        written += len(trace_line(request))
        yield request
format, *paths = sys.argv[1:]
for path in paths:
    prompts = PromptOptions(fields=fields if format == "csv" else None)
    trace = Trace(path, format=format, skip_bad=True, prompts=prompts)
    written = 0
    try:
        Survey.of(counted(trace))
    except TraceError:
        pass
    print(path, status("VmHWM:") - before, written)
"""


def row(base, **fields):
    return json.dumps(base | fields).encode() + b"\n"


def long(base, name, item, end="]"):
    """Return a row without its end, and what makes it longer and longer."""
    text = row(base, **{name: "LONG"}).strip()
    start, rest = text.split(b'"LONG"')
    return start + item[:1], item[1:] + b",", item[1:] + end.encode() + rest + b"\n"


def delta(**fields):
    base = {"session_id": "a", "timestamp": 0, "input_length": 2, "output_length": 0}
    return base | {"hash_ids": [1]} | fields


NAME = "n" * 2**18
REQUEST = {"t": 0, "model": "m", "in": 64, "out": 1, "hash_ids": [1]}
AGENT = {"type": "subagent", "t": 0, "agent_id": "x", "requests": []}
CHAT = {"messages": [{"role": "user", "content": "x"}]}
ITEM = {"input": "x", "created_at": 1}
RESULT = {"type": "tool_result", "content": [{"type": "image"}]}
LITELLM = {"call_type": "a", "startTime": 1, "model": "m"}
LANGFUSE = {"type": "GENERATION", "traceId": "t", "startTime": 1}
SPAN = {"startTimeUnixNano": "1", "attributes": {"gen_ai.input.messages": CHAT["messages"]}}
START, END = b"", b""

# A bomb is what it begins with, what is repeated, and what it ends with.
BOMBS = {
    "mooncake": [
        (START, row(MOONCAKE), END),
        (START, row(MOONCAKE, session=NAME, parent=NAME, stop=NAME), END),
        (START, row(MOONCAKE, session_id=NAME, request_id=NAME, wait_for=[NAME]), END),
        (START, row(MOONCAKE, input_length=10**12, output_length=10**12), END),
        long(MOONCAKE, "hash_ids", b"[1"),
        long(MOONCAKE, "hash_ids", b"[[]"),
        long(MOONCAKE, "other", b"[{}"),
    ],
    "mooncake-delta": [
        (row(delta(output_length=2 * 10**5)), row(delta(input_length=2)), END),
        (
            row(delta(output_length=2 * 10**5, session_id=None)),
            row(delta(output_length=10**5)),
            END,
        ),
        (
            b"".join(row(delta(session_id=f"s{n}", output_length=2**18 - 2)) for n in range(300)),
            row(delta(session_id="s1")),
            END,
        ),
        (START, row(delta(input_length=10**12)), END),
        (START, row(delta(session_id=NAME)), END),
    ],
    "bailian": [
        (START, row(BAILIAN), END),
        (START, row(BAILIAN, chat_id=NAME, parent_chat_id=NAME), END),
        long(BAILIAN, "hash_ids", b"[1"),
    ],
    "lmcache": [
        (START, row(LMCACHE), END),
        (START, row(LMCACHE, model_name=NAME, chunk_hashes=["0xab"] * 1000), END),
        (START, row(LMCACHE, shapes=[[10**9] * 200] * 200, dtypes=["half"] * 200), END),
        long(LMCACHE, "chunk_hashes", b'["0xab"'),
    ],
    "hex": [(START, b"0xabcdef12 " * 100 + b"\n", END), (START, b"0xabcdef12 ", END)],
    "weka": [
        (START, row(WEKA), END),
        (START, row(WEKA, id=NAME, requests=[REQUEST] * 1000), END),
        (START, row(WEKA, id=NAME, requests=[AGENT] * 1000), END),
        (START, row(WEKA, requests=[WEKA_REQUEST | {"model": NAME, "stop": NAME}]), END),
        long(WEKA, "requests", b"[" + json.dumps(REQUEST).encode()),
        long(WEKA, "requests", b"[" + json.dumps(AGENT).encode()),
        (row(WEKA)[:-3], b',{"type":"subagent","t":0,"agent_id":"x","requests":[', END),
    ],
    "dynamo": [
        (START, row(DYNAMO), END),
        (START, row(DYNAMO, agent_context={"session_id": NAME, "parent_session_id": NAME}), END),
        (START, row(DYNAMO, event_type="tool"), END),
    ],
    "openai": [
        (START, row(CHAT), END),
        (START, row(CHAT, model=NAME, user=NAME, tools=[NAME], metadata={NAME: NAME}), END),
        (START, row(CHAT, **{f"field {n}": "x" * 300 for n in range(1000)}), END),
        (START, row({"messages": [{"role": "user", "content": [{}] * 1000}]}), END),
        long(CHAT, "messages", b"[" + json.dumps(CHAT["messages"][0]).encode()),
        long({}, "prompt", b"[1"),
        (b'{"messages":[{"role":"user","content":[{}', b",{}", b"]}]}\n"),
        (b'{"prompt":"', b"x", b'"}\n'),
        (b'{"prompt":"', rb"\ud83d", b'"}\n'),
    ],
    "anthropic": [
        (START, row(CHAT, system=NAME, tools=[{"name": NAME, "input_schema": {}}]), END),
        (START, row({"messages": [{"role": "user", "content": [RESULT] * 1000}]}), END),
    ],
    "responses": [
        (START, row(ITEM, conversation="c"), END),
        (START, row(ITEM | {"input": "x" * 9000}, conversation="c"), END),
        (START, row(ITEM, id=NAME, previous_response_id=NAME), END),
        long({}, "input", b"[" + json.dumps({"type": "reasoning", "summary": []}).encode()),
    ],
    "litellm": [
        (START, row(LITELLM, messages=json.dumps(CHAT["messages"]), trace_id=NAME), END),
        long(LITELLM, "messages", b"[" + json.dumps(CHAT["messages"][0]).encode()),
    ],
    "litellm-blocks": [
        (START, row(LITELLM_BLOCKS, session_id=NAME, model=NAME), END),
        (START, row(LITELLM, metadata={"prefix_block_hashes": ["ab" * 2**16]}), END),
    ],
    "langfuse": [(START, row(LANGFUSE, sessionId=NAME, input=CHAT), END)],
    "helicone": [(START, row({"request_body": json.dumps(CHAT), "user_id": NAME}), END)],
    "openrouter": [(START, row({"generation_id": NAME, "input": CHAT}), END)],
    "otel": [
        (START, row(SPAN, name=NAME), END),
        (START, row({"resourceSpans": [{"scopeSpans": [{"spans": [SPAN] * 500}]}]}), END),
        long(SPAN, "attributes", b'[{"key":"gen_ai.prompt.9.content","value":{"intValue":"9"}}'),
    ],
    "csv": [
        (b"t,p\n", b"1," + b"x" * 200 + b"\n", END),
        (b't,p\n1,"', b"x" * 50 + b"\n", b'"\n'),
        (b"t,p\n", b"1" * 100 + b"," + b"x" * 2**18 + b"\n", END),
        (b"t,p,", b"n,", b"\n"),
    ],
    ORACLE_GENERAL: [(START, bytes(24), END)],
    OBJECTS: [
        (START, b"1,7,4096\n", END),
        (START, b"1," + b"x" * 190 + b",4096\n", END),
        (START, b"x" * 300 + b"\n", END),
    ],
}


def packed_bomb(bomb, size, pack):
    """Return the size of a bomb, at most this one, and its bytes, at most `MOST_BYTES`."""
    start, repeated, end = bomb
    count = max(0, size - len(start) - len(end)) // len(repeated)
    while True:
        data = start + repeated * count + end
        packed = pack(data)
        if len(packed) <= MOST_BYTES:
            return len(data), packed
        count = count * 3 // 5


def test_every_format_has_bombs():
    assert {*BOMBS} == {*FORMATS, *LOG_FORMATS, "csv", ORACLE_GENERAL, OBJECTS}


@pytest.mark.thorough
@pytest.mark.parametrize("format", BOMBS)
def test_a_small_file_takes_little_memory_and_writes_little(tmp_path, format):
    zstd = require(zstd_module(), "compressing a bomb")
    sizes = {}
    for number, bomb in enumerate(BOMBS[format]):
        small_rows = bomb[1].endswith(b"\n") and len(bomb[1]) < ONE_LINE // 100
        size = 2 * ONE_LINE if small_rows and number else UNPACKED
        files = {f"{number}.gz": packed_bomb(bomb, size, gzip.compress)}
        if not small_rows:
            files[f"{number}-line.gz"] = packed_bomb(bomb, ONE_LINE, gzip.compress)
        if number == 0:
            files["0.zst"] = packed_bomb(bomb, ONE_LINE, zstd.compress)
        for name, (size, packed) in files.items():
            path = tmp_path / name
            path.write_bytes(packed)
            sizes[str(path)] = size
    check_reading(format, sizes)


@pytest.mark.thorough
def test_a_small_parquet_file_takes_little_memory_and_writes_little(tmp_path, arrow, parquet):
    sizes = {}
    for number, values in enumerate((["x" * 64], ["x" * 2**17], ["x" * 2**19])):
        rows = UNPACKED // len(values[0])
        column = arrow.DictionaryArray.from_arrays(arrow.repeat(0, rows).cast("int32"), values)
        table = arrow.table({"messages": column, "created": arrow.repeat(1, rows)})
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(table, path, compression="zstd")
        assert path.stat().st_size <= MOST_BYTES
        sizes[str(path)] = UNPACKED
    check_reading("openai", sizes, preload="pyarrow.parquet")


def check_reading(format, sizes, preload="json"):
    code = READ.format(zstd=zstd_module(), preload=preload)
    done = run_python("-c", code, format, *sizes, timeout=600)
    assert done.returncode == 0, done.stderr
    found = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert [path for path, _, _ in found] == list(sizes)
    for path, grown, written in found:
        assert int(grown) <= MOST_MEMORY, path
        assert int(written) <= MOST_WRITTEN * sizes[path], path
