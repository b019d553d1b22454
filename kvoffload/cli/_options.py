"""Arguments and options that several commands share: traces, policies, capacities, sizes."""

from __future__ import annotations

import functools
import inspect
import math
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from kvoffload import CPUOffloadingManager
from kvoffload import _sizes as sizes
from kvoffload._printable import printable
from kvoffload.errors import describe, unknown_name
from kvoffload.policies import registry
from kvoffload.replay.groups import MAX_CHUNK_TOKENS, MAX_STEP_TOKENS
from kvoffload.replay.offline import CEILINGS
from kvoffload.replay.policies import is_own, new_manager
from kvoffload.replay.policies import read_policy as parse_policy
from kvoffload.traces.prompt_blocks import MAX_BYTES_PER_TOKEN, MAX_TOKENS_PER_IMAGE, ROLES
from kvoffload.traces.reader import FORMAT_NAMES

from ._sources import Reading
from ._terminal import keep_quiet

MAX_BLOCKS = 2**31 - 1
MAX_BLOCK_TOKENS = 2**31 - 1
LEAST_BANDWIDTH = 1_000_000  # without a unit
FIELDS_FORM = "messages=FIELD,time=FIELD"
_PERCENT = re.compile(r"(\d{1,18}(?:\.\d{1,9})?|\.\d{1,9})\s*%", re.ASCII)
_TOO_LARGE = re.compile(r"0*[1-9]\d{18,}(?:\.\d*)?\s*(?:[A-Za-z]*|%)", re.ASCII)
_HALF_A_UNIT = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT])i?", re.ASCII | re.IGNORECASE)
# 1,418 as it is printed, or two values of a list, with nothing before or after them
_GROUPED = re.compile(r"(?<![\w.%])[1-9]\d{0,2}(?:,\d{3})+(?!\d|\s*%)", re.ASCII)
# 30,60,120,342, a list because a part after the first has not three digits
_LIST = re.compile(r"\d+(?:,\d+)*,(?!\d{3}(?!\d))\d+(?:,\d+)*", re.ASCII)
_CREDENTIALS = re.compile(r"(?<=://)[^?]*@")

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])


def check_number(text: str) -> None:
    """Refuse a number that is too large or whose unit lacks a letter."""
    if _TOO_LARGE.fullmatch(text):
        raise ValueError(f"must have at most 18 digits, got {describe(text)}, which is too large")
    half = _HALF_A_UNIT.fullmatch(text)
    if half is not None:
        digits, letter = half[1], half[2].upper()
        got = describe(text)
        raise ValueError(f"must be {digits}{letter}B or {digits}{letter}iB, got {got}: which?")


@dataclass(frozen=True, slots=True)
class Capacity:
    """A requested capacity; exactly one of `blocks`, `size` and `percent` is set."""

    text: str  # as it was given
    blocks: int | None = None
    size: int | None = None  # bytes
    percent: Fraction | None = None  # of the unique blocks

    def resolve(
        self,
        block_bytes: int | None,
        unique_blocks: int | None,
        option: str = "--capacity",
        least: int = 1,
        *,
        unit: str = "block",
        needs: str = "--model or --block-bytes",
    ) -> int:
        """Return the number of blocks, at least `least`; messages name `option` and `unit`.

        `needs` names the options that give the bytes of a block, without which a size is refused.
        """
        if self.size is not None:
            if not block_bytes:
                text = f"{option} in bytes needs {needs}, got {self.text!r} without"
                raise click.UsageError(text)
            blocks = self.size // block_bytes
            means = f"{self.size:,} bytes / {block_bytes:,} bytes per {unit}"
        elif self.percent is not None:
            blocks = int(self.percent * (unique_blocks or 0) / 100)
            unique = "unique blocks" if unit == "block" else "unique chunks of a group"
            means = f"{self.text} of {unique_blocks:,} {unique}"
        else:
            blocks = self.blocks or 0
            means = self.text
        if not least <= blocks <= MAX_BLOCKS:
            rule = f"must come to {least} ... {MAX_BLOCKS} {unit}s"
            too_large = ", which is too large" if blocks > MAX_BLOCKS else ""
            raise click.UsageError(f"{option} {rule}, got {blocks} ({means}){too_large}")
        return blocks


def read_capacity(text: str, least: int = 1) -> Capacity:
    """Read a capacity: blocks, a size in bytes or a percentage."""
    check_number(text)
    size = sizes.read_size(text, needs_unit=True)
    if size is not None:
        return Capacity(text, size=size)
    match = _PERCENT.fullmatch(text)
    if match:
        return Capacity(text, percent=Fraction(match[1]))
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        if not least <= int(text) <= MAX_BLOCKS:
            too_large = ", which is too large" if int(text) > MAX_BLOCKS else ""
            raise ValueError(f"must be {least} ... {MAX_BLOCKS} blocks, got {text}{too_large}")
        return Capacity(text, blocks=int(text))
    raise ValueError(
        "must be blocks (4096), a share of the unique blocks (5%) or a size (64GiB), "
        f"got {describe(text)}"
    )


def read_size(text: str) -> int:
    """Read a number of bytes, >= 1, with or without a unit."""
    check_number(text)
    is_number = re.fullmatch(r"[0-9]{1,18}", text)
    size = sizes.read_size(text, needs_unit=not is_number)
    if size is None or size < 1:
        raise ValueError(f"must be bytes >= 1, as 2097152 or 2MiB, got {describe(text)}")
    return size


def read_bandwidth(text: str) -> int:
    """Read bytes per second; a number that is too small to be meant needs a unit."""
    size = read_size(text)
    if text.isdecimal() and size < LEAST_BANDWIDTH:
        raise ValueError(
            f"must have a unit if it is below {LEAST_BANDWIDTH:,}, as 25GB, got {describe(text)}"
        )
    return size


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that cannot start a metric's name."""
    if not re.fullmatch(r"([A-Za-z_:][A-Za-z0-9_:]*)?", prefix):
        raise click.UsageError(f"--prefix must be the start of a metric's name, got {prefix!r}")


def examples(*commands: str) -> str:
    """Return the end of a help text: example commands, unwrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def public(text: str) -> str:
    """Return a text without the users and passwords of addresses in it."""
    return _CREDENTIALS.sub("", text)


def typed_command() -> str:
    """Return the command as it was typed, quoted for a shell; control characters are escaped.

    The salt and the passwords of addresses are left out.
    """
    words = ["kvoffload", *map(public, click.get_current_context().obj)]
    for index, word in enumerate(words):
        if words[index - 1] == "--salt":
            words[index] = "…"
        elif word.startswith("--salt="):
            words[index] = "--salt=…"
    return printable(shlex.join(words))


def value_of(read: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a click callback that reads an option's text."""

    def callback(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else read(text.strip())
        except (TypeError, ValueError) as error:
            raise click.BadParameter(str(error)) from None

    return callback


def values_of(read: Callable[[str], Any]) -> Callable[..., tuple[Any, ...]]:
    """Return a click callback that reads comma-separated lists, repeated or not, as one tuple."""
    read_one = value_of(read)

    def callback(
        ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
    ) -> tuple[Any, ...]:
        for text in texts:
            grouped = None if _LIST.fullmatch(text) else _GROUPED.search(text)
            if grouped is not None:
                one, several = grouped[0].replace(",", ""), grouped[0].replace(",", ", ")
                raise click.BadParameter(
                    f"must be one number or a list, got {grouped[0]!r}: write {one} for a number, "
                    f"{several!r} for a list"
                )
        return tuple(read_one(ctx, param, part) for text in texts for part in text.split(","))

    return callback


class NumberRange(click.FloatRange):
    """A range of numbers; NaN, which compares with no bound, is none of them."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


def of_text(metavar: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the arguments of an option whose text is read by a function."""
    return {"metavar": metavar, "callback": value_of(read)}


def of_list(metavar: str, read: Callable[[str], Any], default: str = "") -> dict[str, Any]:
    """Return the arguments of an option for comma-separated lists, repeated or not."""
    shown = {"default": (default.replace(",", ", "),), "show_default": True} if default else {}
    return {"multiple": True, "metavar": metavar, "callback": values_of(read), **shown}


traces_argument = click.argument("traces", metavar="TRACE...", nargs=-1, required=True)


quiet_option = click.option(
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=keep_quiet,
    help="Print only the result: no progress, no notes.",
)


def read_fields(text: str) -> dict[str, str]:
    """Read the fields of a log by what they hold."""
    found: dict[str, str] = {}
    for part in text.split(","):
        role, _, path = map(str.strip, part.partition("="))
        if role not in ROLES or not path or role in found:
            raise ValueError(
                f"must be {FIELDS_FORM}, each of {', '.join(ROLES)} at most once, got "
                f"{part.strip()!r}"
            )
        found[role] = path
    if not found.keys() & {"messages", "prompt"}:
        raise ValueError(f"must be {FIELDS_FORM}, got none for messages or prompt")
    return found


def read_salt(text: str) -> str:
    """Read a salt; no message shows it."""
    if not text:
        raise ValueError("must not be empty, got an empty text")
    return text


def read_delimiter(text: str) -> str:
    """Read what separates the columns of a table."""
    found = {"tab": "\t", "\\t": "\t"}.get(text, text)
    if len(found) != 1:
        raise ValueError(f"must be one character or tab, got {describe(text)}")
    return found


def bundled(
    name: str, make: Callable[..., Any], *options: Callable[[Any], Any]
) -> Callable[[CommandFunction], CommandFunction]:
    """Return a decorator that adds options, the last in the help first, and bundles values.

    The command is called with what `make` returns of the values that its parameters name, as
    `name`: those of the options, and those that decorators further out provide. Values that a
    command lacks are None. Parameters that begin with an underscore are not filled.
    """
    names = [one for one in inspect.signature(make).parameters if not one.startswith("_")]

    def add(function: CommandFunction) -> CommandFunction:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            made = make(**{one: given.pop(one, None) for one in names})
            return function(**given, **{name: made})

        for option in options:
            command = option(command)
        return cast("CommandFunction", command)

    return add


reading_options = bundled(
    "reading",
    Reading,
    quiet_option,
    click.option("--skip-bad", is_flag=True, help="Skip bad lines and print their number."),
    click.option("--limit", type=click.IntRange(min=1), help="Read at most this many requests."),
    click.option(
        "--delimiter",
        **of_text("CHARACTER", read_delimiter),
        help="What separates the columns of a table, if its first line does not show it.",
    ),
    click.option(
        "--salt",
        **of_text("TEXT", read_salt),
        help="A secret with which prompts make the same ids each time. By default, ids that are "
        "written come from a random key that is not kept.",
    ),
    click.option(
        "--tokens-per-image",
        metavar="N",
        type=click.IntRange(1, MAX_TOKENS_PER_IMAGE),
        help="Tokens that a part of a prompt without text counts as, such as a picture or a "
        "file; 1,000 by default.",
    ),
    click.option(
        "--bytes-per-token",
        type=click.IntRange(1, MAX_BYTES_PER_TOKEN),
        help="Bytes of text that count as a token without a tokenizer; 4 by default.",
    ),
    click.option(
        "--tokenizer",
        metavar="PATH",
        help="For prompts, a tokenizer.json of Hugging Face, or a folder with it, whose chat "
        "template is used, too. By default, tokens are approximated from bytes.",
    ),
    click.option(
        "--fields",
        **of_text("NAMES", read_fields),
        help="Where a log that is not recognised has its prompts: messages=FIELD or "
        "prompt=FIELD, and system, tools, time, session, model, output (tokens); dotted "
        "paths, or columns of a table.",
    ),
    click.option(
        "--format",
        "format",
        metavar="NAME",
        type=click.Choice(FORMAT_NAMES),
        help=f"Format of the trace: {', '.join(FORMAT_NAMES)}. Recognised if not given: "
        "oracle-general and most tables by the file's name, the others by their first line. "
        "openai stands for any log of prompts.",
    ),
    click.option(
        "--model-name",
        metavar="NAME",
        help="Read only the requests to this model: of lmcache, or of a log of prompts.",
    ),
    click.option(
        "--same-ids",
        is_flag=True,
        help="Treat the block ids of several files as one numbering, for a trace that was "
        "split. By default, ids that are not hashes are kept apart per file.",
    ),
)
"""The options of a command that reads a trace."""


def read_policy(text: str) -> str:
    """Read a policy; a user's class may be in the current folder, which is searched last."""
    may_be_own = is_own(text) or "." in text.partition("?")[0]  # a module, for the hint
    if may_be_own and "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return parse_policy(text)


def manager_of(
    policy: str, num_slots: int, unit: str, block_tokens: int | None = None, watch: Any = None
) -> CPUOffloadingManager:
    """Return an empty manager; refuse options of the policy that do not fit this capacity."""
    try:
        return new_manager(policy, num_slots, block_tokens or 1, watch)
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"--policy {policy} at {num_slots} {unit}s: {error}") from None


def read_policy_or_ceiling(text: str) -> str:
    """Read a policy, or the name of a ceiling."""
    if text in CEILINGS:
        return text
    name, question, _ = text.partition("?")
    if name in CEILINGS and question:
        raise ValueError(f"policy {name} has no options, got {describe(text)}")
    if not is_own(text) and "." not in name and name not in registry.names():
        known = (*registry.names(), *CEILINGS)
        raise unknown_name("policy", name, known, ", or MODULE:CLASS")
    return read_policy(text)


def policy_option(default: str) -> Callable[[CommandFunction], CommandFunction]:
    """Return the option for the policies to compare."""
    return click.option(
        "--policy",
        "policies",
        **of_list("POLICY", read_policy_or_ceiling, default),
        help="Policies to compare, comma-separated or repeated: NAME or 'NAME?OPTION=VALUE' (see "
        "kvoffload policies), or MODULE:CLASS for your own. belady, which knows the future, and "
        "infinite, which keeps everything, are ceilings; infinite is not a ceiling for some "
        "models with windows or states.",
    )


def capacity_option(default: str) -> Callable[[CommandFunction], CommandFunction]:
    """Return the option for the capacities to compare."""
    return click.option(
        "--capacity",
        "capacities",
        **of_list("SIZE", read_capacity, default),
        help="Capacities to compare, comma-separated or repeated: blocks (4096), a share of the "
        "unique blocks rounded down (5%), or a size (64GiB, with --model or --block-bytes).",
    )


device_memory_option = click.option(
    "--device-memory",
    **of_text("SIZE", functools.partial(read_capacity, least=0)),
    help="Size of the accelerator's own LRU prefix cache, which is asked first: blocks, a share "
    "of the unique blocks or a size. By default there is no such cache; advise assumes a typical "
    "one if it knows the model.",
)

block_bytes_option = click.option(
    "--block-bytes",
    **of_text("BYTES", read_size),
    help="Bytes per block, needed for sizes in bytes; LMCache's log states it.",
)

block_tokens_option = click.option(
    "--block-tokens",
    type=click.IntRange(min=1, max=MAX_CHUNK_TOKENS),
    help="Tokens per block; inferred if one size fits all requests.",
)

full_blocks_option = click.option(
    "--full-blocks", is_flag=True, help="Drop blocks that a prompt fills only partly."
)


def step_tokens_option(
    default: int | None, how: str
) -> Callable[[CommandFunction], CommandFunction]:
    """Return the option for the tokens of a scheduler step; `how` says what holds without it."""
    return click.option(
        "--step-tokens",
        type=click.IntRange(min=1, max=MAX_STEP_TOKENS),
        default=default,
        show_default=default is not None,
        help="Most tokens that a scheduler step computes (--max-num-batched-tokens of vllm "
        f"serve): prompts are offered step by step, as in vLLM{how}.",
    )


jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 2**16),
    help="Processes that share the work; by default one per usable CPU core, one for few blocks.",
)


dask_option = click.option(
    "--dask",
    metavar="ADDRESS",
    help="Scheduler of a Dask cluster that computes instead (tcp://host:8786); its workers need "
    "the same kvoffload, and the trace at the same path.",
)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the generated workload.",
)

workload_seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Seed of the generated workload, if no TRACE is given.  [default: 0]",
)
