"""Logs of requests with their prompts: objects whose fields, by dotted paths, say what was asked.

A `Log` names the fields of one gateway; `LogParser` reads its rows. Error messages name fields and
types, never values, which hold people's prompts. Nothing that could be a prompt is dropped
silently: fields that are not read are counted by name if they hold text, rows without a prompt are
counted by their kind, and parts of messages without text count as `tokens_per_image` tokens.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from kvoffload._printable import plural
from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.prompt_blocks import ROLES, PromptOptions, check_tokens
from kvoffload.traces.request import MAX_TOKENS, Request

from .base import Agreed, Format, HexadecimalIds, Parser, bounded_name, kind_of, text_size
from .clock import unix_seconds
from .continued import History
from .conversation import MOST_UNREAD, PART_KINDS, Conversation, Message
from .json_text import decoded, packed, unpacked


def within(holders: Iterable[str], *names: str) -> tuple[str, ...]:
    """Return the paths of names in each of several holders, ``""`` being the row itself."""
    return tuple(f"{holder}.{name}" if holder else name for holder in holders for name in names)


BODIES = (
    "",
    "request",
    "body",
    "proxy_server_request",
    "request.body",
    "proxy_server_request.body",
)
"""Places where gateways and batch files put a request within a row, and the row itself."""
HOLDERS = ("", *BODIES[1:], "response", "response.body")
"""Places of the time and of the answer's tokens."""
ANSWERS = (
    *("response", "choices", "output", "completion", "response_body", "usage", "usageDetails"),
    *("gen_ai.output.messages", "gen_ai.completion"),
)
PROMPTS = (
    *("messages", "prompt", "system", "system_prompt", "system_instruction", "instructions"),
    *("input", "contents", "tools", "functions", "documents", "suffix"),
)
"""Fields of which some API makes a prompt."""
PLACES = within(("", "request"), "call_type", "url", "path", "endpoint", "request_path")
"""Places of the name of the call that a row is of."""
_OTHER_CALLS = re.compile(
    r"(?:^|[/_a])(?:embeddings?|rerank|moderations?|transcriptions?|speech|images?/|image_|"
    r"count_tokens|(?:de)?tokenize)|/(?:models|health\w*|metrics|ping|version)/?(?:\?|$)",
    re.IGNORECASE,
)
STATUSES = (
    *("status", "status_code", "statusCode", "http_status", "response_status"),
    *("level", "type"),
)
"""Fields of a row or an answer that say whether the request failed, by a word or a status."""
LEAST_UNIX = 10**8
"""The least Unix time of a log, seconds, in 1973; lower ones count from the log's own start."""
LEAST_ERROR = 400
"""The smallest HTTP status of an error."""
NO_ERROR = ("", "none", "null", "nan", "false", "0", "no", "ok")
"""Words, in lower case, for an error that did not happen."""
MOST_LEVELS = 3  # of objects within a row in which a field is named
MOST_NAMED = 50  # fields that are not read
MOST_SHOWN, MOST_GUESSED = 80, 70  # characters of the fields of a row that is not known
MOST_NAME = 64  # characters of a text without a blank that is taken for a name, such as a digest
REMEMBERED = 2**18  # requests of which a later row is known
MOST_PART_TOKENS = 2**20  # of a request's parts without text
MOST_STATED = 2
"""Times as many tokens as are read here that a log may count before that is said."""
CUT = "... (litellm_truncated skipped "
"""Text in place of what LiteLLM leaves out of long texts that it stores."""
_FIELD = re.compile(r"[\w\-. ]{1,60}")
_TOKENS = re.compile(r"(\d{1,18})(?:\.0*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fields:
    """Dotted paths into a row by what is there; of several, the first that is there counts.

    `messages` are a list of messages or items, or a text; `prompt` is a text or a list of token
    ids. A key may have dots itself.
    """

    messages: tuple[str, ...] = within(BODIES, "messages")
    prompt: tuple[str, ...] = within(BODIES, "prompt")
    system: tuple[str, ...] = within(BODIES, "system")
    tools: tuple[str, ...] = within(BODIES, "tools", "functions")
    time: tuple[str, ...] = (
        *within(
            HOLDERS, "start_time", "startTime", "timestamp", "created_at", "created", "time", "ts"
        ),
        *("@timestamp", "time_iso8601", "time_local", "datetime"),  # of web servers, and others
    )
    session: tuple[str, ...] = tuple(
        path
        for name in ("session_id", "conversation_id", "end_user", "user", "user_id")
        for holder in HOLDERS
        for path in within((holder, f"{holder}.metadata".removeprefix(".")), name)
    )
    model: tuple[str, ...] = within((*BODIES[1:], ""), "model")
    output: tuple[str, ...] = (
        *within(HOLDERS, "usage.completion_tokens", "usage.output_tokens"),
        *("completion_tokens", "output_tokens"),
    )


Hashes = tuple[list[str], int | None]
"""Hashes of blocks, hexadecimal, and the tokens of a block if they are known."""


@dataclass(frozen=True, slots=True)
class Log(Format):
    """A log of requests with their prompts, as one gateway writes it.

    `is_one` recognises a row. `rows` divides a row that holds several requests, and returns an
    object for each. `why_none` says of a row that is no prompt what it is, else nothing. `advice`
    says how the gateway is told to log prompts. In a log that `continues`, a row may list only what
    is new since the response or in the conversation that it names. A log with `hashes` has those of
    blocks in place of prompts; it returns None for a row without. `ids` are the paths of the id
    of a request: a row with the id and the prompt of an earlier one is the same request.
    """

    has_hashes: bool = True
    _: KW_ONLY
    fields: Fields = field(default_factory=Fields)
    is_one: Callable[[Row], object] = lambda _: False
    rows: Callable[[dict[str, Any]], Iterable[dict[str, Any]]] = lambda given: (given,)
    why_none: Callable[[Row], str] = lambda _: ""
    advice: str = ""
    continues: bool = False
    hashes: Callable[[Row], Hashes | None] | None = None
    ids: tuple[str, ...] = ()


def mapped(name: str, fields: Mapping[str, str]) -> Log:
    """Return the log whose fields are the given ones: a path for each of some `ROLES`."""
    paths = {role: (fields[role],) if role in fields else () for role in ROLES}
    return Log(name, fields=Fields(**paths))


class Row:
    """A row whose values are found by dotted paths; text that holds JSON is parsed on the way."""

    __slots__ = ("_texts", "given")

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self._texts: dict[tuple[int, str], str] = {}  # that have been parsed, by where they were

    def at(self, path: str, *, parsed: bool = True) -> Any:
        """Return the value at a path, None without one; `parsed`: not as a text of JSON.

        Otherwise it is as given, also if another path leads through it.
        """
        value: Any = self.given
        name = path
        while isinstance(value, dict):
            if name in value:
                as_given = self._texts.get((id(value), name), value[name])
                return self.parsed(value, name) if parsed else as_given
            head, _, name = name.partition(".")
            if not name or head not in value:
                return None
            value = self.parsed(value, head)
        return None

    def first(self, paths: Iterable[str], *, parsed: bool = True) -> tuple[str, Any]:
        """Return the first path with a value that is not empty, and the value; else "", None."""
        for path in paths:
            value = self.at(path, parsed=parsed)
            if value is not None and value != "":
                return path, value
        return "", None

    def parsed(self, holder: dict[str, Any], name: str) -> Any:
        """Return a value of an object within the row, not as a text of JSON."""
        value = holder[name]
        if isinstance(value, str) and value.startswith(("{", "[")):
            self._texts[id(holder), name] = value
            holder[name] = value = unpacked(value)
        return value


class LogParser(Parser):
    """A parser of the rows of a log; times are Unix times, milliseconds.

    `log_of` recognises rows of other logs, as a gateway that serves several APIs writes them.
    `ahead` looks at lines that follow; it is called once, if the first request has no time.
    """

    def __init__(
        self,
        options: PromptOptions,
        log: Log,
        log_of: Callable[[dict[str, Any]], Log | None] | None = None,
        ahead: Callable[[], Iterable[bytes]] = tuple,
    ) -> None:
        self._options = options
        self._blocks, self._breaks = options.blocks, options.breaks
        self._log, self._log_of, self._ahead = log, log_of, ahead
        self.block_tokens: int | None = self._blocks.block_tokens
        self._tokens = Agreed()  # of the blocks that rows have the hashes of
        self._ids: dict[str, HexadecimalIds] = {}  # of them, for one model
        self._is_timed: bool | None = None  # as the first request shows
        self._some_time: float | None = None  # of a row, seconds, not 0; 0 if none is known to have
        self._has_text = False  # of which tokens are made
        self._num_cut = 0  # requests whose prompts a gateway has cut
        self._stated = self._made = 0  # tokens of prompts by the log's counts, and by ours
        self._read: dict[str, Counter[str]] = {role: Counter() for role in ROLES}
        self._unread: Counter[str] = Counter()  # rows by field
        self._left_out: Counter[str] = Counter()  # rows by kind
        self._models: Counter[str] = Counter()  # requests by model, also those not wanted
        self._parts: Counter[str] = Counter()  # without text, by type
        self._part_tokens = 0  # of the row
        self._marks: dict[str, int] = {}  # of the row's parts without text: their tokens
        self._row_unread: dict[str, None] = {}
        self._known: dict[int, None] = {}  # requests with an id: hashes of id and prompt
        self._talk = Conversation(self._mark, self._note)
        self._history = History(self._talk)

    def requests(self, line: bytes) -> list[Request]:
        """Parse a line."""
        try:
            return self._requests(_object(line), self._log)
        except RecursionError:
            raise BadLineError("must be nested less deeply, got more lists and objects") from None

    def _requests(self, given: dict[str, Any], log: Log) -> list[Request]:
        """Return the requests of an object of a log."""
        return [each for row in log.rows(given) for each in self._request(Row(row), log)]

    def _request(self, row: Row, log: Log) -> Sequence[Request]:
        fields = log.fields
        why = other_call(row) or log.why_none(row) or why_failed(row)
        if why:
            other = self._other(row, log)
            if other is not None:
                return self._requests(row.given, other)
            self._left_out[why] += 1
            return ()
        hashes = None if log.hashes is None else log.hashes(row)
        path, given = _messages(row, fields.messages)
        is_chat = given is not None
        if not is_chat:
            path, given = row.first(fields.prompt, parsed=False)
        if log.hashes is not None and hashes is None:
            self._left_out["without the hashes of blocks"] += 1
            return ()
        if given is None and hashes is None:
            other = self._other(row, log)
            if other is not None:
                return self._requests(row.given, other)
            self._check_without(row, log)
            return ()
        used = {"messages" if is_chat else "prompt": path}
        used["model"], model = _name_at(row, fields.model)
        model = bounded_name(model)
        if self.model_name not in (None, model):
            self._note_model(model)
            return ()
        used["time"], time = row.first(fields.time)
        seconds = None if time is None else unix_seconds(time, used["time"])
        if self._lacks_time(seconds, log):
            return ()
        used["output"], output = _output_at(row, fields.output)
        used["session"], session = _name_at(row, fields.session)
        self._marks, self._row_unread, self._part_tokens = {}, {}, 0
        if hashes is not None:
            length, hash_ids = self._hashed(row, hashes, model)
        elif is_chat:
            messages = self._talk.messages(given, path)
            if log.continues:
                session, messages = self._history.whole(row, messages, session, self._marks)
            used["tools"], given = row.first(fields.tools)
            tools = self._talk.tools(given, used["tools"])
            used["system"], given = row.first(fields.system)
            messages = self._talk.system(given, used["system"]) + messages
            length, hash_ids = self._chat(messages, tools, model, seconds or 0.0)
        else:
            length, hash_ids = self._completion(given, path, model)
        self._is_timed = seconds is not None
        if self._is_repeated(row, log, (length, hash_ids)):
            self._left_out["of requests that an earlier row has"] += 1
            return ()
        if self._some_time and self._some_time >= LEAST_UNIX:
            self.start = 0.0
        self._note_model(model)
        self._count_tokens(row, used["output"], length)
        self._count_fields(row, fields, used, is_chat=is_chat)
        named = self._blocks.session(session) if session else None
        return (Request(round(1000 * (seconds or 0.0)), length, output, hash_ids, named),)

    def _lacks_time(self, seconds: float | None, log: Log) -> bool:
        """Return whether a row lacks the time that others have, and is left out.

        Beside Unix times, 0 is none.
        """
        if not self._some_time:
            is_first = self._some_time is None
            self._some_time = seconds or (self._time_ahead(log) if is_first else 0.0)
        if seconds is not None and self._is_timed is False:
            rule = "must have no time as the first request has none, got one"
            raise BadLineError(f"{rule}: take out the rows without a time, or all times")
        is_time = seconds is not None and (seconds > 0.0 or self._some_time < LEAST_UNIX)
        if is_time or not self._some_time:
            return False
        self._left_out["without a time, which others have"] += 1
        return True

    def _time_ahead(self, log: Log) -> float:
        """Return the first time of rows that follow, seconds, or 0."""
        for line in self._ahead():
            with suppress(BadLineError, RecursionError):  # raised in its turn
                for row in log.rows(_object(line)):
                    path, time = Row(row).first(log.fields.time)
                    if time is not None and (seconds := unix_seconds(time, path)):
                        return seconds
        return 0.0

    def _note_model(self, model: str) -> None:
        if model in self._models or len(self._models) < MOST_NAMED:
            self._models[model] += 1

    @property
    def _models_text(self) -> str:
        most = self._models.most_common(3)
        named = [f"{describe(name) if name else 'no model'} ({count:,})" for name, count in most]
        return ", ".join([*named, "…"] if len(self._models) > len(named) else named)

    def _is_repeated(self, row: Row, log: Log, prompt: object) -> bool:
        """Return whether an earlier row has the request, as in joined exports; else remember it."""
        _, name = row.first(log.ids, parsed=False)
        if name is None:
            return False
        key = hash((str(name), prompt))
        if key in self._known:
            return True
        if len(self._known) >= REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[key] = None
        return False

    def _other(self, row: Row, log: Log) -> Log | None:
        """Return the log that wrote a row if it is not the one of the first row."""
        if self._log_of is None or log is not self._log:
            return None
        other = self._log_of(row.given)
        return None if other is log else other

    def _chat(
        self, messages: list[Message], tools: list[Any] | None, model: str, seconds: float
    ) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of a chat and the ids of its blocks."""
        template = self._blocks.template
        texts = self._talk.texts(messages, tools) if template is None or self._breaks else []
        if self._breaks is not None:
            texts = self._breaks.seen(texts)
            if template is not None and self._breaks.cuts:
                messages = [
                    {**message, "content": self._breaks.cut(message["role"], message["content"])}
                    for message in messages
                ]
        if template is not None:
            text = template.render(messages, tools, seconds)
            return self._text(text, model, special=False)
        return self._text("".join([f"{role}\n{text}\n" for role, text in texts]), model)

    def _text(self, text: str, model: str, *, special: bool = True) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of the text of a prompt and the ids of its blocks."""
        self._has_text = True
        self._num_cut += CUT in text
        return self._blocks.of_text(text, model, special=special, marks=self._marks)

    def _hashed(self, row: Row, hashes: Hashes, model: str) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of a prompt, 0 if they are not known, and the ids of its blocks."""
        self.block_tokens = self._tokens.with_one(hashes[1] or self._options.block_tokens)
        if model not in self._ids:
            self._ids = {model: HexadecimalIds(model.encode("utf-8", "surrogatepass"))}
        _, tokens = _output_at(row, ("prompt_tokens",))
        return tokens, self._ids[model].of(hashes[0], "hashes[{}]")

    def _completion(self, prompt: Any, path: str, model: str) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of a prompt, which is a text or token ids, and its blocks' ids."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            if self._breaks is not None:
                ((_, prompt),) = self._breaks.seen([("prompt", prompt)])
            return self._text(prompt, model)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return self._blocks.of_tokens(check_tokens(prompt, path), model)
        found = kind_of(prompt)
        if isinstance(prompt, list):
            found = f"a list with {kind_of(next(t for t in prompt if type(t) is not int))}"
        raise BadLineError(f"{path} must be a text or a list of token ids, got {found}")

    @property
    def has_prompts(self) -> bool:
        """Whether blocks are made of prompts."""
        return self._log.hashes is None

    @property
    def remarks(self) -> list[str]:
        """Assumptions about the lines so far, and fields that were not read, in words."""
        counts = (counter.most_common(1) for counter in self._read.values())
        fields = [found[0][0] for found in counts if found]
        if not fields:
            return []
        said = [f"read as {self._log.name}: {', '.join(fields)}"]
        if self._has_text and self._blocks.is_approximate:
            size = self._blocks.bytes_per_token
            those = "1 byte of text counts" if size == 1 else f"{size} bytes of text count"
            said.append(f"{those} as a token (--tokenizer counts them)")
        if self._parts:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in self._parts.items())
            each = f"{self._blocks.tokens_per_image:,} tokens each (--tokens-per-image)"
            said.append(f"parts without text count as {each}: {kinds}")
        if not self._some_time:
            said.append("no request has a time, so all times are 0")
        found = ["; ".join(said)]
        if len(self._models) > 1 and self.model_name is None:
            found.append(
                f"requests to {self._models_text} count together: --model-name selects a model"
            )
        found += [
            f"{plural(count, 'row')} left out: {why}" for why, count in self._left_out.items()
        ]
        found += self._history.remarks
        found += [
            f"no row has a value at `{path}`, which is named as {role}"
            for role, path in (self._options.fields or {}).items()
            if not self._read[role]
        ]
        if self._num_cut:
            found.append(
                f"{plural(self._num_cut, 'row')} with prompts that LiteLLM has cut, so these "
                "figures are not those of whole prompts: MAX_STRING_LENGTH_PROMPT_IN_DB sets the "
                "length of texts that it stores"
            )
        if self._stated > MOST_STATED * self._made:
            found.append(
                f"the log counts {self._stated:,} tokens in prompts that have {self._made:,} here: "
                "it may lack parts of them"
            )
        return found + [
            f"{plural(count, 'row')} {'have' if count > 1 else 'has'} text in `{name}` "
            "that is not read"
            + (f" (--fields system={name})" if name.rpartition(".")[2].startswith("system") else "")
            for name, count in self._unread.items()
        ]

    @property
    def nothing_text(self) -> str:
        """Contents of the lines instead of requests, in words, or an empty text."""
        if self.model_name is not None and self._models:
            return f"requests to {self._models_text}"
        if not self._left_out:
            return ""
        counts = ", ".join(f"{plural(count, 'row')} {why}" for why, count in self._left_out.items())
        return f"{counts}{self._log.advice and f'; {self._log.advice}'}"

    def _mark(self, part: dict[str, Any], kind: object) -> str:
        """Return the mark of a part without text, and note its tokens."""
        data = packed(part).encode("utf-8", "surrogatepass")
        mark = f"<{self._blocks.digest(data)}>"
        self._parts[str(kind) if kind in PART_KINDS else "other"] += 1
        tokens = self._marks[mark] = self._blocks.part_tokens(len(data))
        self._part_tokens += tokens
        if self._part_tokens > MOST_PART_TOKENS:
            rule = f"parts without text must have at most {MOST_PART_TOKENS} tokens together"
            raise BadLineError(f"{rule}, got more")
        return mark

    def _check_without(self, row: Row, log: Log) -> None:
        """Count a row without a prompt; BadLineError if it may hold one that is not known."""
        for path in (*log.fields.messages, *log.fields.prompt):
            value = row.at(path)
            if value:
                raise BadLineError(f"{path} must be a list of objects, got {kind_of(value)}")
            if value is not None:
                break
        else:
            is_new = self._is_timed is None and not log.advice
            asked = {name: value for name, value in row.given.items() if name not in ANSWERS}
            if is_new or text_size(asked) > MOST_UNREAD:
                raise BadLineError(unknown(row.given))
        self._left_out["without a prompt"] += 1

    def _count_tokens(self, row: Row, path: str, length: int) -> None:
        """Count the tokens of a prompt as made, and as the log states them beside the answer's."""
        # `completion_tokens` stand beside `prompt_tokens`, and so on
        beside = path.replace("completion", "prompt").replace("output", "input")
        stated = row.at(beside) if beside != path else None
        if type(stated) is int and 0 < stated <= MAX_TOKENS:
            self._stated += stated
            self._made += length

    def _count_fields(
        self, row: Row, fields: Fields, used: Mapping[str, str], *, is_chat: bool
    ) -> None:
        """Count the fields that were read, and those that hold text and were not."""
        for role, path in used.items():
            if path:
                self._read[role][path] += 1
        if not self.has_prompts:
            return
        read = {*used.values(), *fields.system, *fields.tools} if is_chat else {*used.values()}
        self._note_fields(row.given, "", read | {*(fields.messages if is_chat else ())})
        for name in self._row_unread:
            if name in self._unread or len(self._unread) < MOST_NAMED:
                self._unread[name] += 1

    def _note_fields(self, holder: dict[str, Any], path: str, read: set[str]) -> None:
        for name, value in holder.items():
            if path + name in read or name in ANSWERS:
                continue
            if name in PROMPTS and not isinstance(value, dict):
                if text_size(value):
                    self._note(path, name)
            elif isinstance(value, dict) and path.count(".") < MOST_LEVELS:
                inner = name if _FIELD.fullmatch(name) else "…"
                self._note_fields(value, f"{path}{inner}.", read)
            elif text_size(value) > MOST_UNREAD:
                self._note(path, name)

    def _note(self, path: str, name: str) -> None:
        if len(self._row_unread) < MOST_NAMED:
            self._row_unread[path + (name if _FIELD.fullmatch(name) else "…")] = None


def _object(line: bytes) -> dict[str, Any]:
    """Decode a line that must hold an object."""
    given = decoded(line)
    if not isinstance(given, dict):
        raise BadLineError(f"must be a JSON object, got {kind_of(given)}")
    return given


def other_call(row: Row) -> str:
    """Return what a call is that has no prompt, else an empty text."""
    for path in PLACES:
        value = row.at(path, parsed=False)
        if isinstance(value, str) and _OTHER_CALLS.search(value):
            return "of calls that are no chats"
    return ""


def why_failed(row: Row) -> str:
    """Return that a row or its answer states that the request failed, else an empty text."""
    for holder in (row.given, row.at("response")):
        if isinstance(holder, dict):
            error = row.parsed(holder, "error") if "error" in holder else None
            if isinstance(error, str | bool):
                error = str(error).strip().lower() not in NO_ERROR
            if error and isinstance(error, dict | bool):
                return "of requests that failed"
            if any(name in holder and _is_failure(holder[name]) for name in STATUSES):
                return "of requests that failed"
    return ""


def _is_failure(status: object) -> bool:
    """Return whether a word, a status of HTTP or that of a span says that a request failed."""
    if isinstance(status, dict):
        return status.get("code") in (2, "2", "STATUS_CODE_ERROR", "ERROR")
    word = str(status).lower().removesuffix(".0")  # of a column of numbers with gaps
    is_code = word.isdecimal() and len(word) == len("404")
    return word in ("failure", "failed", "error") or (is_code and int(word) >= LEAST_ERROR)


def unknown(row: dict[str, Any], near: str = "") -> str:
    """Return what is wrong with a row without a known prompt: its fields, and how to name them.

    `near` is the name of the log that it is most like.
    """
    if "role" in row and "content" in row:
        return (
            "must have all messages of a request, got one message in a row: group the rows of a "
            "conversation into a list, messages"
        )
    names = [*_names(row, "", MOST_LEVELS)]
    shown = ", ".join(names)
    if len(shown) > MOST_SHOWN:
        cut = shown[:MOST_SHOWN]
        shown = f"{cut.rpartition(', ')[0] or cut}, …"
    guess = _guess(row, names)
    skipped = "" if guess.startswith("messages=") else "; --skip-bad skips rows that have none"
    return (
        "must have messages, a prompt or the ids of blocks, got an object with the fields "
        f"{shown or 'of no name'}{near and f' (most like {near})'}; "
        f"--fields {shlex.quote(guess)} names where they are{skipped}"
    )


def _names(holder: Mapping[str, Any], path: str, levels: int) -> Iterator[str]:
    """Yield the dotted names of the fields of an object that can be written.

    A text that holds a request is an object, as in a container's log; any other may be a prompt.
    """
    for name, value in holder.items():
        if _FIELD.fullmatch(name):
            inner = unpacked(value) if isinstance(value, str) and value[:1] == "{" else None
            if isinstance(inner, dict) and inner.keys() & {*PROMPTS, *BODIES}:
                value = inner  # noqa: PLW2901
            if isinstance(value, dict) and value and levels > 1:
                yield from _names(value, f"{path}{name}.", levels - 1)
            else:
                yield path + name


def _guess(row: dict[str, Any], names: list[str]) -> str:
    """Return a mapping of fields to start from."""
    at = functools.partial(Row(row).at, parsed=False)
    names = [name for name in names if len(name) < MOST_GUESSED - len("messages=")]
    asked = [name for name in names if not {*name.split(".")} & {*ANSWERS, "tools", "functions"}]
    lists = [name for name in asked if _are_all(dict, at(name))]
    texts = [
        name
        for name in asked
        if (isinstance(at(name), str) and _is_prose(at(name))) or _are_all(int, at(name))
    ]
    texts.sort(key=lambda name: -len(at(name)))
    first = lists[0] if lists else texts[0] if texts else "FIELD"
    found = [f"messages={first}" if lists else f"prompt={first}"]
    for role, pattern in _LIKE.items():
        name = next((name for name in names if pattern.search(name)), None)
        if name is not None and name != first:
            found.append(f"{role}={name}")
    while len(found) > 1 and sum(map(len, found)) > MOST_GUESSED:
        found.pop()
    return ",".join(found)


def _is_prose(text: str) -> bool:
    """Return whether a text may be a prompt, not a time, or a name of a model, path or session."""
    with suppress(BadLineError):
        unix_seconds(text, "")
        return False
    return " " in text or len(text) > MOST_NAME


def _are_all(kind: type, value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is kind for each in value)


_LIKE = {
    "time": re.compile(r"time|created|(?:^|[_.])at$|date|(?:^|\.)ts$", re.IGNORECASE),
    "session": re.compile(r"session|conv|thread|chat_?id|user", re.IGNORECASE),
    "model": re.compile(r"model", re.IGNORECASE),
    "output": re.compile(r"(completion|output|generated).*tokens?", re.IGNORECASE),
    "system": re.compile(r"system", re.IGNORECASE),
}


def _messages(row: Row, paths: Iterable[str]) -> tuple[str, Any]:
    """Return the first path with a list of messages, or else with a text; else "", None."""
    other: tuple[str, Any] = "", None
    for path in paths:
        text, value = row.at(path, parsed=False), row.at(path)
        if isinstance(text, str) and path.endswith("input") and not _is_known(value):
            value = text  # which happens to be JSON
        if isinstance(value, list) and value:
            return path, value
        if isinstance(value, str) and value and other[1] is None:
            other = path, value
    return other


def _is_known(value: object) -> bool:
    """Return whether JSON in a text is empty, has a prompt, or is a list of messages or items."""
    if isinstance(value, list):
        return all(isinstance(one, dict) and one.keys() & {"role", "type"} for one in value)
    return isinstance(value, dict) and (not value or "prompt" in value)


def _name_at(row: Row, paths: Iterable[str]) -> tuple[str, str]:
    """Return the first path with a name, and the name; both empty without one."""
    for path in paths:
        value = row.at(path, parsed=False)
        if type(value) in (str, int) and value != "":
            return path, str(value)
        if value is not None and value != "" and "metadata" not in path:
            raise BadLineError(f"{path} must be a string, got {kind_of(value)}")
    return "", ""


def _output_at(row: Row, paths: Iterable[str]) -> tuple[str, int]:
    """Return the first path with the tokens of the answer, and these; "", 0 if not known."""
    path, value = row.first(paths)
    match = _TOKENS.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None or (isinstance(value, float) and value.is_integer()):
        value = int(match[1] if match is not None else value)
    if value is None:
        return "", 0
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        found = "another integer" if type(value) is int else kind_of(value)
        raise BadLineError(f"{path} must be an integer >= 0, got {found}")
    return path, value
