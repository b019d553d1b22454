"""Options for replays in which sessions wait for their answers."""

from __future__ import annotations

import re
from typing import Any

import click

from kvoffload.errors import describe
from kvoffload.replay.configuration import DECODE_NS

from ._options import NumberRange, bundled
from ._sources import refuse_given

RECORDED = "recorded"
MOST_RATE = 10**12
MOST_DECODE_MS = 10**6
NS_A_MS = 10**6
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")


def read_rate(text: str, other: str = "") -> int:
    """Read a rate in whole tokens per second; errors also name an `other` allowed word."""
    try:
        rate = float(text.replace(",", "") if _GROUPED.fullmatch(text) else text)
    except ValueError:
        rate = 0.0
    if not 1 <= rate <= MOST_RATE:
        words = f"{other} or a number" if other else "a number"
        raise ValueError(f"must be {words} 1 ... {MOST_RATE}, got {describe(text)}")
    return round(rate)


def _loop(closed_loop: str | None, decode_ms: float | None) -> dict[str, Any]:
    if closed_loop is None:
        refuse_given("must go with --closed-loop, got it without", "decode_ms")
        return {}
    try:
        rate = None if closed_loop == RECORDED else read_rate(closed_loop, RECORDED)
    except ValueError as error:
        raise click.UsageError(f"--closed-loop {error}") from None
    if rate is None:
        refuse_given(f"must go with a rate, got it with {RECORDED}", "decode_ms")
    decode_ns = DECODE_NS if decode_ms is None else round(decode_ms * NS_A_MS)
    loop = "closed" if rate is not None else "recorded"
    return {"loop": loop, "rate": rate, "decode_ns": decode_ns}


loop_options = bundled(
    "loop",
    _loop,
    click.option(
        "--decode-ms",
        type=NumberRange(min=0, max=MOST_DECODE_MS),
        help="Milliseconds per token of an answer in a closed loop.  [default: "
        f"{DECODE_NS // NS_A_MS}]",
    ),
    click.option(
        "--closed-loop",
        metavar=f"TOKENS_PER_SECOND|{RECORDED}",
        help="Send each request of a session only after the previous one was answered, by an "
        f"engine that computes this many prompt tokens per second. {RECORDED}: answers take "
        "as long as recorded.",
    ),
)
"""The options of a closed loop: ``loop``, arguments of a `Configuration`, empty without one."""
