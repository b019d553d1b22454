"""Logs of prompts: equal prefixes share ids, and no text of a prompt leaves."""

from __future__ import annotations

import json
import traceback
from datetime import datetime, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.traces import MergedTrace, PromptOptions, Survey, Trace, TraceError
from kvoffload.traces.chat_template import ChatTemplate
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.formats.gateways import OPENAI
from kvoffload.traces.formats.logs import LogParser
from kvoffload.traces.prompt_blocks import PromptBlocks
from kvoffload.traces.sorting import counted_from_first, sorted_by_time
from kvoffload.traces.writer import trace_line

SECRET = "qZx7secret"
UNIX = 1732550000
LONG = "You are a helpful assistant. " * 20


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def chat(*texts, system=LONG, **more):
    messages = [message("system", system)]
    for index, text in enumerate(texts):
        messages.append(message("assistant" if index % 2 else "user", text))
    return {"timestamp": UNIX, "model": "m", "messages": messages, **more}


def written(folder, *rows, name="log.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trace_of(folder, *rows, **options):
    return Trace(written(folder, *rows), format="openai", prompts=PromptOptions(**options))


def read(folder, *rows, **options):
    return list(trace_of(folder, *rows, **options))


def parsed(row):
    (request,) = LogParser(PromptOptions(), OPENAI).requests(json.dumps(row).encode())
    return request


def rule(folder, *rows, **options):
    with pytest.raises(TraceError) as caught:
        read(folder, *rows, **options)
    return caught.value.rule


def shared(one, other):
    """Return how many leading blocks two requests share; the others must all differ."""
    pairs = zip(one.hash_ids, other.hash_ids, strict=False)
    same = [a == b for a, b in pairs]
    count = same.index(False) if False in same else len(same)
    assert not set(one.hash_ids[count:]) & set(other.hash_ids[count:])
    return count


def test_a_conversation_shares_all_full_blocks_of_its_turns(tmp_path):
    trace = trace_of(tmp_path, chat("a" * 300), chat("a" * 300, "b" * 300, "c" * 300))
    first, second = trace
    assert shared(first, second) == len(first.hash_ids) == first.input_length // 16 > 10
    assert (trace.format, trace.block_tokens, trace.has_hashes) == ("openai", 16, True)
    assert all(0 <= block < 2**63 for block in second.hash_ids)
    rows = [chat(f"{start}{'same text ' * 100}") for start in "ab"]
    assert Survey.of(read(tmp_path, *rows, *rows)).chaining.unchained_ids == 0


@pytest.mark.parametrize(
    "change",
    [
        {"system": "Another" + LONG},
        {"model": "other"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_another_start_of_the_prompt_shares_nothing(tmp_path, change):
    one, other = read(tmp_path, chat("x" * 500), chat("x" * 500, **change))
    assert shared(one, other) == 0


def test_a_salt_makes_the_same_ids_and_none_makes_others(tmp_path):
    path = written(tmp_path, chat("x" * 100))

    def ids(**options):
        (one,) = Trace(path, format="openai", prompts=PromptOptions(**options))
        return one.hash_ids

    assert ids(salt="a") == ids(salt="a")
    assert not set(ids(salt="a")) & set(ids(salt="b"))
    assert not set(ids()) & set(ids())
    trace = Trace(path, format="openai")
    assert list(trace) == list(trace), "one key for one trace"


def test_no_salt_is_shown():
    assert SECRET not in repr(PromptOptions(salt=SECRET))
    with pytest.raises(ValueError, match="salt must be a non-empty text"):
        PromptOptions(salt="")


def test_files_share_their_ids_and_are_placed_by_their_clock(tmp_path):
    one = written(tmp_path, chat("x" * 100), name="a.jsonl")
    other = written(tmp_path, chat("x" * 100, timestamp=UNIX - 3), name="b.jsonl")
    merged = MergedTrace([str(one), str(other)], format="openai")
    first, second = counted_from_first(merged)
    assert first.hash_ids == second.hash_ids
    assert (first.timestamp, second.timestamp) == (0, 3000)
    assert merged.id_spaces == 1


@pytest.mark.parametrize("name", ["timestamp", "created", "created_at", "time", "ts", "start_time"])
@pytest.mark.parametrize(
    "value",
    [
        UNIX + 0.25,
        1000 * UNIX + 250,
        10**6 * UNIX + 250_000,
        10**9 * UNIX + 250 * 10**6,
        str(UNIX + 0.25),
        "2024-11-25T15:53:20.25Z",
        "2024-11-25 15:53:20,250",
        "2024-11-25T17:53:20.250000+02:00",
        "2024-11-25T10:23:20.25-0530",
        "25/Nov/2024:15:53:20 +0000",
        "25/nov/2024:17:53:20 +0200",
        "Mon, 25 Nov 2024 15:53:20 GMT",
        "25 Nov 2024 15:53:20 UTC",
    ],
)
def test_times_in_all_their_forms(name, value):
    row = {name: value, "prompt": "x"}
    of_a_server_or_mail = "nov" in str(value).lower()
    assert parsed(row).timestamp == 1000 * UNIX + (0 if of_a_server_or_mail else 250)
    assert datetime.fromtimestamp(UNIX, timezone.utc).isoformat() == "2024-11-25T15:53:20+00:00"


@pytest.mark.parametrize(
    "value",
    [
        *(-1, True, [1], "soon", "2024-13-01T00:00:00", 10**30, {}),
        *("31/Feb/2024:00:00:00 +0000", "25/Foo/2024:15:53:20 +0000", "25/Nov/2024:15:53:20"),
    ],
)
def test_what_is_no_time_is_named_without_its_value(tmp_path, value):
    text = rule(tmp_path, chat("x", timestamp=value))
    assert text.startswith("timestamp must be Unix time or a time as in ISO 8601, got ")
    assert "soon" not in text


def test_without_times_all_are_0(tmp_path):
    bare = {"prompt": "x" * 200}
    trace = trace_of(tmp_path, bare, bare)
    assert [one.timestamp for one in trace] == [0, 0]
    assert "no request has a time, so all times are 0" in trace.remarks[0]


def test_times_are_sorted_before_they_count_from_the_first(tmp_path):
    rows = [chat("x", timestamp=UNIX + later) for later in (5, 0, 2)]
    found = counted_from_first(sorted_by_time(read(tmp_path, *rows)))
    assert [one.timestamp for one in found] == [0, 2000, 5000]
    assert [one.timestamp for one in counted_from_first(read(tmp_path, *rows))] == [0, 0, 0]


def test_sessions_are_told_apart_by_names_of_their_own(tmp_path):
    rows = [chat("x", user=SECRET), chat("x", session_id=3, user="u"), chat("x", user=SECRET)]
    first, second, third = (one.session for one in read(tmp_path, *rows))
    assert first == third != second
    assert SECRET not in first
    assert second not in ("3", "u")


def test_parts_are_their_texts_and_others_count_by_what_they_are(tmp_path):
    def parts(*given):
        return {"timestamp": 1, "messages": [message("user", list(given)), message("user", LONG)]}

    def image(data):
        return {"type": "image_url", "image_url": {"url": f"data:{data * 5000}"}}

    text = {"type": "text", "text": "a" * 200}
    plain = {"timestamp": 1, "messages": [message("user", "a" * 200), message("user", LONG)]}
    rows = [parts(text), plain, parts("a" * 200), *(parts(text, image(data)) for data in "vvw")]
    one, same, bare, first, again, other = read(tmp_path, *rows)
    assert one == same == bare
    assert first == again
    assert shared(first, other) == shared(first, one) == 3
    assert first.input_length == one.input_length + 1000, "and a line end"


def lengths(folder, *contents, **options):
    """Return the tokens of requests whose one message has these contents, less those of none."""
    rows = [{"timestamp": 1, "messages": [message("user", content)]} for content in ("", *contents)]
    nothing, *others = read(folder, *rows, bytes_per_token=1, block_tokens=1, **options)
    return [one.input_length - nothing.input_length for one in others]


def test_results_and_calls_of_tools_count_with_all_their_text(tmp_path):
    words = "line of a file\n" * 90
    parts = [
        {"type": "tool_result", "tool_use_id": "t", "content": words},
        {"type": "tool_result", "content": [{"type": "text", "text": words}]},
        {"type": "document", "source": {"type": "text", "data": words}},
        {"type": "document", "source": {"type": "content", "content": [words]}},
        {"type": "thinking", "thinking": words, "signature": "s" * 500},
        {"type": "refusal", "refusal": words},
    ]
    assert lengths(tmp_path, *([part] for part in parts)) == [len(words)] * len(parts)
    (one,) = lengths(tmp_path, [{"type": "tool_use", "name": "f", "input": {"path": "w" * 500}}])
    assert one > 500


@pytest.mark.parametrize(
    "holder",
    [
        lambda part: {"type": "document", "source": {"type": "content", "content": [part]}},
        lambda part: {"type": "tool_result", "content": [part]},
    ],
)
def test_parts_within_parts_are_read_to_a_depth(tmp_path, holder):
    parts = ["w" * 500]
    for _ in range(20):
        parts.append(holder(parts[-1]))
    found = lengths(tmp_path, *([part] for part in parts), tokens_per_image=7)
    assert set(found) == {500, 7}
    assert found == sorted(found, reverse=True)


def test_parts_of_hardly_any_bytes_do_not_multiply_the_input(tmp_path):
    (tokens,) = lengths(tmp_path, [{}] * 100, tokens_per_image=1000)
    assert tokens < 100 * 70
    many = {"messages": [message("user", [{"type": SECRET * 4, "n": n} for n in range(1100)])]}
    assert rule(tmp_path, many).startswith("parts without text must have at most 1048576 tokens")


def test_pictures_count_with_a_tokenizer_too(model, tmp_path):
    picture = {"type": "image_url", "image_url": {"url": "https://x.org/" + "p" * 40}}
    text = {"type": "text", "text": "one two"}
    rows = [{"messages": [message("user", parts)]} for parts in ([text], [picture, text])]
    one, other = read(tmp_path, *rows, tokenizer=model, tokens_per_image=500)
    assert other.input_length == one.input_length + 500


def test_the_body_of_a_row_of_litellm_and_its_own_session_count(tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    plain = chat("x", session_id="t", tools=tools, usage={"completion_tokens": 7})
    body = {"messages": plain["messages"], "tools": tools}
    row = {"call_type": "acompletion", "startTime": UNIX, "completion_tokens": 7, "model": "m"}
    rows = [
        {**row, "trace_id": "t", "messages": "{}"}
        | {"proxy_server_request": json.dumps({"body": body})},
        {**row, "trace_id": "u", "session_id": "t", "end_user": "v", "messages": {}}
        | {"proxy_server_request": body},
    ]
    trace = trace_of(tmp_path, *rows, salt="s")
    assert list(trace) == read(tmp_path, plain, salt="s") * 2
    assert len(trace.remarks) == 1
    body = {"instructions": LONG, "input": [message("user", "x")], "tools": tools}
    row |= {"call_type": "aresponses", "session_id": "t", "messages": "{}"}
    assert read(tmp_path, row | {"proxy_server_request": body}, salt="s") == list(trace)[:1]


def test_metadata_names_a_session(tmp_path):
    rows = [chat("x", metadata={"user_id": "a", "user": {"any": 1}}), chat("x", user="a")]
    first, second = read(tmp_path, *rows)
    assert first.session == second.session is not None


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"system_prompt": "a", "note": LONG, "usage": {"x": LONG}}, ["system_prompt", "note"]),
        ({"metadata": {"a": {"template": LONG}, "b": "short"}}, ["metadata.a.template"]),
        ({"input": [{"content": "x"}], "prompt": "x", "tokens": 5}, ["input", "prompt"]),
        ({"a b\n": LONG}, ["…"]),
        ({"documents": [], "instructions": None, "input": 3}, []),
        ({"messages": [message("user", "x", thinking=LONG)]}, ["messages[].thinking"]),
        (
            {"messages": [message("user", [{"type": "text", "text": "x", "more": LONG}])]},
            ["messages[].content[].more"],
        ),
    ],
)
def test_fields_with_text_that_is_not_read_are_named_with_their_rows(tmp_path, row, fields):
    whole = {"messages": [message("user", "x")]} | row
    trace = trace_of(tmp_path, whole, whole)
    list(trace)
    assert [text.partition(" (")[0] for text in trace.remarks[1:]] == [
        f"2 rows have text in `{name}` that is not read" for name in fields
    ]
    for text, name in zip(trace.remarks[1:], fields, strict=True):
        assert text.endswith(f" (--fields system={name})") == name.startswith("system")
    wrapped = trace_of(tmp_path, {"request": whole, "response": LONG})
    list(wrapped)
    assert [text.partition("`")[0] for text in wrapped.remarks[1:]] == ["1 row has text in "] * len(
        fields
    )


def test_a_message_may_have_its_text_in_another_field(tmp_path):
    one, other = read(
        tmp_path,
        {"messages": [{"role": "user", "text": LONG}]},
        {"messages": [message("user", LONG)]},
    )
    assert one == other
    trace = trace_of(tmp_path, {"messages": [{"role": "user", "said": "short"}]})
    list(trace)
    assert trace.remarks[1:] == ["1 row has text in `messages[].said` that is not read"]


def test_fields_beside_a_completion_are_named_too(tmp_path):
    trace = trace_of(tmp_path, {"prompt": "x", "system": "s", "suffix": "end"})
    list(trace)
    assert [remark.split("`")[1] for remark in trace.remarks[1:]] == ["system", "suffix"]


def test_half_a_pair_of_surrogates_is_read(tmp_path):
    path = tmp_path / "log.jsonl"
    texts = [rb"\ud83d" + b"a" * 300, rb"\ud83d" + b"a" * 300, rb"\ud83e" + b"a" * 300]
    path.write_bytes(b"\n".join(b'{"prompt":"%b","tools":["%b"]}' % (t, t) for t in texts))
    first, same, other = Trace(path)
    assert first == same
    assert shared(first, other) == 0
    row = b'{"messages":[{"role":"user","content":[{"type":"%b"}],"name":"%b"}]}'
    path.write_bytes(row % (texts[0], texts[0]))
    assert len(list(Trace(path, format="openai"))) == 1


def test_numbers_and_nesting_without_bounds_are_bad_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    deep = b"[" * 5000 + b"]" * 5000
    part = b'{"type":"tool_result","content":['
    parts = part * 200 + b"]}" * 200
    for line in (
        b'{"prompt":"x","time":1e400}',
        b'{"prompt":"x","time":1%b}' % (b"0" * 400),
        b'{"prompt":"\\ud83d","time":NaN}',
        b'{"prompt":"\\ud83d","time":Infinity}',
        b'{"prompt":"\\ud83d","usage":{"completion_tokens":1e400}}',
        b'{"prompt":"x","other":%b}' % deep,
        b'{"messages":%b}' % deep,
    ):
        path.write_bytes(line)
        with pytest.raises(TraceError):
            list(Trace(path, format="openai"))
    path.write_bytes(b'{"messages":[{"role":"user","content":[%b]}]}' % parts)
    assert len(list(Trace(path, format="openai"))) == 1


def test_tool_calls_belong_to_the_prompt(tmp_path):
    def row(name):
        calls = [{"id": "1", "function": {"name": name, "arguments": "{}"}}]
        turns = [message("assistant", None, tool_calls=calls), message("tool", LONG)]
        return {"ts": 1, "messages": turns}

    one, other = read(tmp_path, row("f"), row("g"))
    assert shared(one, other) == 0


def test_a_prompt_may_be_a_text_of_json(tmp_path):
    for text in ('["a"]', '[{"a": 1}]', '{"a": 1}'):
        same = {"messages": [message("user", text)], "created_at": UNIX}
        asked = {"input": text, "created_at": UNIX}
        assert read(tmp_path, asked, salt="s") == read(tmp_path, same, salt="s")


def test_completions_with_text_or_token_ids(tmp_path):
    ids = list(range(1000, 1100))
    rows = [{"prompt": ids}, {"prompt": [ids[:50] + ids]}, {"prompt": ["x" * 640]}]
    tokens, longer, text = read(tmp_path, *rows)
    assert (tokens.input_length, len(tokens.hash_ids)) == (100, 6)
    assert shared(tokens, longer) == 3
    assert (text.input_length, len(text.hash_ids)) == (160, 10)
    trace = trace_of(tmp_path, rows[0], block_tokens=10)
    (one,) = trace
    assert len(one.hash_ids) == 10
    assert "bytes" not in trace.remarks[0], "the tokens are known"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x", "must be a JSON object, got a string"),
        ({"x": 1}, "must have messages, a prompt or the ids of blocks, got an object with the fi"),
        ({"role": "user", "content": "x"}, "must have all messages of a request, got one message"),
        ({"prompt": 3}, "prompt must be a text or a list of token ids, got an integer"),
        ({"prompt": ["a", "b"]}, "prompt must be a text or a list of token ids, got a list with a"),
        ({"prompt": [1, -1]}, "prompt[1] must be a token id, 0 ... 4294967295, got another"),
        ({"messages": {"a": 1}}, "messages must be a list of objects, got an object"),
        ({"messages": {}}, "a trace must hold at least one request, got 1 row without a prompt"),
        ({"messages": ["x"]}, "messages[0] must be an object, got a string"),
        ({"messages": [{}]}, "messages[0].role must be a string, got null or nothing"),
        (
            {"messages": [message("user", 3)]},
            "messages[0].content must be a text or a list of parts, got an integer",
        ),
        (
            {"messages": [message("user", [3])]},
            "messages[0].content must be a list of texts and objects, got an integer",
        ),
        ({"prompt": "x", "model": []}, "model must be a string, got a list"),
        ({"prompt": "x", "user": {}}, "user must be a string, got an object"),
        ({"messages": "x", "tools": "x"}, "tools must be a list, got a string"),
        (
            {"prompt": "x", "usage": {"completion_tokens": -3}},
            "usage.completion_tokens must be an integer >= 0, got another integer",
        ),
    ],
)
def test_a_bad_line_names_field_and_type(tmp_path, row, message):
    assert rule(tmp_path, row).startswith(message)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.just(SECRET),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "text", "type", "function", "messages"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
FIELDS = ["messages", "prompt", "request", "body", "model", "tools", "user", "usage", "timestamp"]
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just(SECRET) | VALUES, "content": VALUES}), max_size=3
)


def told_of(line):
    """Return the row of a line, or what its error and a traceback say."""
    try:
        requests = LogParser(PromptOptions(block_tokens=1), OPENAI).requests(line)
    except BadLineError as error:
        return "".join(traceback.format_exception(error))
    return b"".join(map(trace_line, requests)).decode()


@given(
    row=st.dictionaries(st.sampled_from(FIELDS), VALUES | MESSAGES, max_size=5),
    cut=st.integers(0, 30),
)
@example(row={"prompt": SECRET * 50, "user": SECRET, "model": SECRET}, cut=0)
@example(row={"messages": [{"role": SECRET, "content": [{SECRET: SECRET}]}]}, cut=0)
@example(row={"prompt": SECRET}, cut=3)
def test_no_text_is_in_rows_or_errors(row, cut):
    line = json.dumps(row).encode()
    line = line[: len(line) - cut] if cut else line
    assert SECRET not in told_of(line)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a folder with a small tokenizer, of words."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizer extra")
    pytest.importorskip("jinja2", reason="needs the tokenizer extra")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]", "[BOS]"])
    tokenizer.train_from_iterator(["one two three four user assistant"], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    tokenizer.enable_truncation(4)
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def with_template(model, folder, template, config=None):
    """Return a folder like `model` with a chat template, in the configuration if there is one."""
    (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    if config is None:
        (folder / "chat_template.jinja").write_text(template)
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_counts_tokens_and_truncates_nothing(model, tmp_path):
    rows = [{"prompt": "one two three " * 10}, {"prompt": "one two three " * 5 + "four " * 9}]
    for path in (model, model / "tokenizer.json"):
        prompts = PromptOptions(tokenizer=path, block_tokens=4)
        first, second = Trace(written(tmp_path, *rows), format="openai", prompts=prompts)
        assert (first.input_length, len(first.hash_ids)) == (31, 7)
        assert shared(first, second) == 4
        assert not prompts.blocks.is_approximate


TEMPLATE = """{{ bos_token }}{{ " " }}{%- for message in messages %}
{%- if message.content is string and message.role == "user" %}
user {{ message.content | trim }}
{%- else %}{% generation %} assistant {{ message["content"] }}{% endgeneration %}
{%- endif %}
{%- endfor %}{% if add_generation_prompt %} assistant{% endif %}"""


@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_a_chat_template_is_rendered(model, tmp_path, place):
    config = {"bos_token": {"content": "four"}, "chat_template": TEMPLATE}
    if place == "list":
        config["chat_template"] = [{"name": "default", "template": TEMPLATE}]
    folder = with_template(model, tmp_path, TEMPLATE, None if place == "file" else config)
    blocks = PromptBlocks(PromptOptions(tokenizer=folder))
    messages = [message("user", " one "), message("assistant", "two")]
    start = "" if place == "file" else "four"
    told = " ".join(blocks.template.render(messages, None, 0.0).split())
    assert told.removeprefix("four").strip() == "user one assistant two assistant"
    assert told.startswith(start)
    (one,) = read(tmp_path, {"messages": messages}, tokenizer=folder, block_tokens=1)
    assert one.input_length == len(told.split())


def test_templates_use_what_chat_templates_use(model, tmp_path):
    """What Jinja has beside, and what the library adds."""
    template = (
        "{% for message in messages %}{{ message.role }}{% break %}{% endfor %}"
        "{% for call in messages[-1].tool_calls %}{{ call.function.arguments.a }}{% endfor %}"
        "{{ tools | tojson }}{{ tools | tojson(indent=1) | length }}{{ strftime_now('%d %b %Y') }}"
        "{{ missing }}{{ messages | map(attribute='content') | first }}"
    )
    calls = [{"function": {"name": "f", "arguments": '{"a": 5}'}}]
    messages = [message("user", "hé"), message("assistant", "", tool_calls=calls)]
    row = {"messages": messages, "tools": [{"é": 1}], "timestamp": UNIX}
    folder = with_template(model, tmp_path, template)
    rendered = []

    def render(self, *arguments):
        rendered.append(original(self, *arguments))
        return rendered[-1]

    original = ChatTemplate.render
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTemplate, "render", render)
        read(tmp_path, row, tokenizer=folder)
    assert rendered == ['user5[{"é": 1}]1825 Nov 2024hé']


def test_a_refusal_of_a_template_is_named(model, tmp_path):
    folder = with_template(model, tmp_path, "{{ raise_exception(messages[0].content) }}")
    text = rule(tmp_path, chat(SECRET, system=SECRET), tokenizer=folder)
    assert text == "the chat template must accept the messages, got a refusal"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json: must be a tokenizer.json of Hugging Face: "),
        ("tokenizer.json", None, "tokenizer.json: must be a readable file: No such file or dir"),
        ("chat_template.jinja", "\n{% if", "must be a Jinja chat template, got an error in "),
        ("chat_template.jinja", "{{ x | nofilter }}", "must be a Jinja chat template, got"),
        ("chat_template.jinja", "x" * 2**21, "must be at most 1048576 bytes long, got more"),
        ("tokenizer_config.json", "[]", "must be a JSON object, got something else"),
    ],
)
def test_files_of_a_tokenizer_are_named(model, tmp_path, name, content, message):
    with_template(model, tmp_path, "x")
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(TraceError) as caught:
        read(tmp_path, chat("x"), tokenizer=tmp_path)
    assert message in str(caught.value)
