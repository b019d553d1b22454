"""Logs of prompts: equal prefixes share ids, and no text of a prompt leaves."""

from __future__ import annotations

import json
import traceback

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.traces import MergedTrace, PromptOptions, Trace, TraceError
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


def test_nesting_without_bounds_makes_bad_lines(tmp_path):
    """How deep a line may be nested depends on the version of Python."""
    path = tmp_path / "log.jsonl"
    deep = b"[" * 5000 + b"]" * 5000
    for line in (b'{"prompt":"x","other":%b}' % deep, b'{"messages":%b}' % deep):
        path.write_bytes(line)
        with pytest.raises(TraceError):
            list(Trace(path, format="openai"))


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


def test_times_are_sorted_before_they_count_from_the_first(tmp_path):
    rows = [chat("x", timestamp=UNIX + later) for later in (5, 0, 2)]
    found = counted_from_first(sorted_by_time(read(tmp_path, *rows)))
    assert [one.timestamp for one in found] == [0, 2000, 5000]
    assert [one.timestamp for one in counted_from_first(read(tmp_path, *rows))] == [0, 0, 0]


def test_pictures_count_with_a_tokenizer_too(model, tmp_path):
    picture = {"type": "image_url", "image_url": {"url": "https://x.org/" + "p" * 40}}
    text = {"type": "text", "text": "one two"}
    rows = [{"messages": [message("user", parts)]} for parts in ([text], [picture, text])]
    one, other = read(tmp_path, *rows, tokenizer=model, tokens_per_image=500)
    assert other.input_length == one.input_length + 500


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


PANICS = """{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "normalizer":
{"type": "Precompiled", "precompiled_charsmap": "%s"}, "post_processor": {"type":
"TemplateProcessing", "single": [{"Sequence": {"id": "%s", "type_id": 0}}], "pair": [
{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
"special_tokens": {}}}"""
"""Tokenizers at which the library panics: as it reads one, and as that reads a prompt."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json: must be a tokenizer.json of Hugging Face: "),
        ("tokenizer.json", None, "tokenizer.json: must be a readable file: No such file or dir"),
        ("tokenizer.json", PANICS % ("", "A"), "must be a tokenizer.json of Hugging Face: Precomp"),
        ("tokenizer.json", PANICS % ("CAAAAAAAAAAAAAAA", "B"), "the tokenizer must accept the p"),
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
