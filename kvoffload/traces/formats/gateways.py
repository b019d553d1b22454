"""The logs of gateways, a `Log` each, and the recognition of a row.

Sources, looked up in each project's documentation: OpenAI's and Anthropic's API references, LiteLLM
(StandardLoggingPayload, spend logs), Langfuse (observations API v2, fields of the blob storage
export), Helicone (export tool), OpenRouter (generations), OpenTelemetry (``otel``). To add one,
write its `Log` here, and rows of it in ``tests/traces/golden.txt``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import chain
from typing import Any

from kvoffload.traces.errors import BadLineError

from .base import integer
from .logs import BODIES, Fields, Hashes, Log, Row, other_call, why_failed, within
from .otel import INPUT, PREFIXES, RESOURCES, spans

_BASE = Fields()
_SESSION = _BASE.session
_ATTRIBUTES = ("attributes", "")  # of a span, and of a row that has them at its top
OBSERVATIONS = frozenset(
    ("GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR")
) | {"EMBEDDING", "GUARDRAIL"}
_NO_TEXT = "redacted-by-litellm"
REDACTED = (_NO_TEXT, [{"role": "user", "content": _NO_TEXT}])
# The callback of LiteLLM 1.111: chained, keyed hashes of 16 hexadecimal digits in the metadata of
# a row, the last one of a block that may be filled in part. A row may state the tokens of a block.
_BLOCKS = "prefix_block_hashes"
_LISTS = ("hash_ids", "hashes", "ids", "block_hashes", _BLOCKS)
_SIZES = ("block_size", "block_tokens")
MOST_LEVELS = 3  # of metadata within metadata
CHATS = ("chat", "text_completion", "generate_content", "")
"""Operations of a span that have a prompt; spans need not say theirs."""


def _has_messages(row: Row) -> bool:
    paths = (*_BASE.messages, *_BASE.prompt)
    return any(row.at(path, parsed=False) is not None for path in paths)


def _has_input(row: Row) -> bool:
    """Return whether a row is a request of the Responses API."""
    if _has_messages(row):
        return False
    given = (row.at(path, parsed=False) for path in within(BODIES, "input"))
    return any(isinstance(each, str | list) for each in given)


def _is_anthropic(row: Row) -> bool:
    if not _has_messages(row):
        return False
    _, system = row.first(_BASE.system)
    _, tools = row.first(_BASE.tools)
    has_schema = isinstance(tools, list) and any(
        isinstance(tool, dict) and "input_schema" in tool for tool in tools[:1]
    )
    return system is not None or has_schema


def _is_otel(row: Row) -> bool:
    if row.given.keys() & RESOURCES:
        return True
    attributes = row.at("attributes")
    names = [*row.given, *(attributes if isinstance(attributes, dict) else ())]
    return "startTimeUnixNano" in row.given or any(name.startswith(PREFIXES) for name in names)


def _why_no_chat(row: Row) -> str:
    """Return what a span is that has no prompt."""
    _, operation = row.first(within(_ATTRIBUTES, "gen_ai.operation.name"))
    if (operation or "") not in CHATS:
        return "of spans that are no chats"
    if not any(row.at(path) is not None for path in OTEL.fields.messages):
        return "of spans without a prompt"
    return _why_not_asked(row)


def _why_no_generation(row: Row) -> str:
    if row.given.get("type") != "GENERATION":
        return "of observations that are no generations"
    return _why_not_asked(row)


def _why_not_asked(row: Row) -> str:
    """Return why no engine computed the prompt of a row."""
    if str(row.given.get("cache_hit")).lower() == "true":
        return "of answers from the gateway's own cache"
    if row.at("messages") in REDACTED:
        return "whose prompts LiteLLM has redacted (litellm_settings: turn_off_message_logging)"
    return ""


OTEL = Log(
    "otel",
    is_one=_is_otel,
    rows=spans,
    ids=("spanId", "span_id"),
    why_none=_why_no_chat,
    fields=Fields(
        messages=within(_ATTRIBUTES, INPUT, "gen_ai.prompt"),
        prompt=(),
        system=within(_ATTRIBUTES, "gen_ai.system_instructions"),
        tools=within(_ATTRIBUTES, "gen_ai.tool.definitions"),
        time=(
            *("startTimeUnixNano", "start_time_unix_nano", "start_time", "timestamp"),
            *("timeUnixNano", "observedTimeUnixNano"),
        ),
        session=within(
            _ATTRIBUTES, "gen_ai.conversation.id", "session.id", "langfuse.session.id", "user.id"
        ),
        model=within(
            _ATTRIBUTES, "gen_ai.request.model", "gen_ai.response.model", "llm.model_name"
        ),
        output=within(
            _ATTRIBUTES,
            *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
            "llm.token_count.completion",
        ),
    ),
    advice="prompts are written if the instrumentation captures the content of messages, such as "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY",
)


def _observations(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the observations of a page of the API, or the one that a row is."""
    page = given.get("data")
    if not isinstance(page, list) or not (page or "meta" in given):
        return [given]
    return [one if isinstance(one, dict) else {} for one in page]


def _is_observation(given: dict[str, Any]) -> bool:
    """Return whether an object is an observation of Langfuse."""
    has_trace = "traceId" in given or "trace_id" in given
    return has_trace and str(given.get("type")) in OBSERVATIONS


LANGFUSE = Log(
    "langfuse",
    is_one=lambda row: all(map(_is_observation, _observations(row.given)[:1])),
    rows=_observations,
    ids=("id",),
    why_none=_why_no_generation,
    fields=Fields(
        messages=("input.messages", "input"),
        prompt=("input.prompt", "input"),
        system=("input.system",),
        tools=("input.tools", "modelParameters.tools", "model_parameters.tools"),
        time=("startTime", "start_time"),
        session=("sessionId", "session_id", "traceId", "trace_id"),
        model=("model", "providedModelName", "provided_model_name", "model_id"),
        output=(
            *("usageDetails.output", "usage_details.output", "usage.output"),
            *("usage.completionTokens", "completionTokens", "output_tokens"),
        ),
    ),
    advice="an export needs the field group that has input and output",
)

_LITELLM_BODIES = ("", "model_parameters", "proxy_server_request", "proxy_server_request.body")

LITELLM = Log(
    "litellm",
    is_one=lambda row: "call_type" in row.given,
    ids=("request_id", "id"),
    why_none=_why_not_asked,
    fields=Fields(
        messages=(*_BASE.messages, *within(_LITELLM_BODIES, "input")),
        tools=within(_LITELLM_BODIES, "tools", "functions"),
        system=within(_LITELLM_BODIES, "system", "instructions"),
        time=("startTime", "start_time"),
        session=(
            *("session_id", "metadata.session_id", "trace_id"),
            *("end_user", "metadata.user_api_key_end_user_id", "user"),
        ),
        model=("model", "model_group"),
        output=("completion_tokens", "response.usage.completion_tokens"),
    ),
    advice="LiteLLM stores prompts with general_settings: store_prompts_in_spend_logs: true",
)


def _hashes_of(row: Row) -> Hashes | None:
    """Return the hashes of a row and the tokens of a block, as far as it states them."""
    found = next(_lists(row, row.given, MOST_LEVELS), None)
    if found is None:
        return None
    holder, hashes = found
    if not all(type(text) is str for text in hashes):
        raise BadLineError(f"{_BLOCKS} must be a list of strings, got another list")
    sizes = (holder.get(name) for name in _SIZES)
    size = next((value for value in sizes if value is not None), None)
    return hashes, None if size is None else integer(size, "block_size", least=1)


def _lists(
    row: Row, holder: dict[str, Any], levels: int
) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield the list of hashes in a row or in its metadata, and the object that it is in."""
    given = row.parsed(holder, _BLOCKS) if _BLOCKS in holder else None
    if isinstance(given, list):
        yield holder, given
    elif isinstance(given, dict):
        lists = (given.get(name) for name in _LISTS)
        yield from ((given, found) for found in lists if isinstance(found, list))
    if levels > 1:
        for name in holder:
            if "metadata" in name:
                inner = row.parsed(holder, name)
                if isinstance(inner, dict):
                    yield from _lists(row, inner, levels - 1)


LITELLM_BLOCKS = replace(
    LITELLM,
    name="litellm-blocks",
    is_one=_hashes_of,
    hashes=_hashes_of,
    advice="LiteLLM writes them with the callback prefix_block_hashes",
)

HELICONE = Log(
    "helicone",
    is_one=lambda row: "request_body" in row.given or "request_created_at" in row.given,
    ids=("request_id",),
    why_none=_why_not_asked,
    fields=Fields(
        messages=within(("request_body",), "messages", "input"),
        prompt=("request_body.prompt",),
        system=within(("request_body",), "system", "instructions"),
        tools=within(("request_body",), "tools", "functions"),
        time=("request_created_at", *_BASE.time),  # web servers may log a request_body, too
        session=(
            *within(("request_properties", "properties"), "Helicone-Session-Id"),
            *("request_user_id", *_SESSION),
            *within(("request_body",), "user", "metadata.user_id"),
        ),
        model=("request_body.model", "request_model", "model"),
        output=(
            *("completion_tokens", "response_body.usage.completion_tokens"),
            "response_body.usage.output_tokens",
        ),
    ),
    advice="npx @helicone/export writes the bodies with --include-body",
)

OPENROUTER = Log(
    "openrouter",
    is_one=lambda row: "generation_id" in row.given or "native_tokens_completion" in row.given,
    ids=("generation_id", "id"),
    fields=Fields(
        messages=within(("input", "request", ""), "messages"),
        prompt=within(("input", "request", ""), "prompt"),
        system=within(("input", "request"), "system"),
        tools=within(("input", "request"), "tools"),
        time=("created_at",),
        session=("session_id", "user", "external_user"),
        model=("model", "model_permaslug"),
        output=("native_tokens_completion", "tokens_completion"),
    ),
    advice="OpenRouter stores prompts where Input & Output Logging is on",
)

RESPONSES = Log(
    "responses",
    is_one=_has_input,
    continues=True,
    fields=Fields(
        messages=within(BODIES, "input"),
        prompt=(),
        system=within(BODIES, "instructions"),
        tools=within(BODIES, "tools"),
        session=(*within(BODIES, "conversation.id"), *_SESSION),
    ),
)

ANTHROPIC = Log("anthropic", is_one=_is_anthropic)

OPENAI = Log("openai", is_one=_has_messages)

LEAST_COMMON = 2  # fields with the log that a row is most like
ANY_LOG = OPENAI
"""The format that stands for all of them where it is named."""

LOGS: dict[str, Log] = {
    log.name: log
    for log in (
        *(OTEL, LANGFUSE, LITELLM_BLOCKS, LITELLM, HELICONE, OPENROUTER, RESPONSES, ANTHROPIC),
        OPENAI,
    )
}
"""By name, those with marks of their own first."""


def nearest(given: dict[str, Any]) -> str:
    """Return the name of the log whose fields a row has most of; empty if hardly any, or a tie."""
    names = {*given} | {
        name for value in given.values() if isinstance(value, dict) for name in value
    }
    counts = {
        log.name: len(names & {*".".join(chain(*astuple(log.fields))).split(".")})
        for log in LOGS.values()
        if log.hashes is None
    }
    most = max(counts.values())
    best = [name for name, count in counts.items() if count == most]
    return best[0] if most >= LEAST_COMMON and len(best) == 1 else ""


def log_of(given: dict[str, Any]) -> Log | None:
    """Return the log that a row is of, None if it is of none."""
    row = Row(given)
    found = next((log for log in LOGS.values() if log.is_one(row)), None)
    if found is None and why_failed(row):
        return ANY_LOG
    return ANY_LOG if found in (None, RESPONSES) and other_call(row) else found
