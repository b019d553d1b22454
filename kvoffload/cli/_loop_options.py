"""Options for replays in which sessions wait for their answers."""

from __future__ import annotations

import re
from typing import Any

import click

from kvoffload.errors import describe
from kvoffload.replay.configuration import DECODE_NS

from ._options import NumberRange, bundled

RECORDED = "recorded"
MOST_RATE = 10**12
MOST_DECODE_MS = 10**6
_NS_A_MS = 10**6
_RATE = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})*|[0-9]+(?:_[0-9]+)*")


def read_rate(text: str, other: str = "") -> int:
    """Read a rate, whole tokens per second; errors also name an `other` allowed word."""
    digits = text.replace(",", "").replace("_", "")
    is_number = _RATE.fullmatch(text) and len(digits) <= len(str(MOST_RATE))
    if not is_number or not 1 <= int(digits) <= MOST_RATE:
        words = f"{other} or an integer" if other else "an integer"
        raise ValueError(f"must be {words} 1 ... {MOST_RATE}, got {describe(text)}")
    return int(digits)


def _loop(closed_loop: str | None, decode_ms: float | None) -> dict[str, Any]:
    if closed_loop is None:
        if decode_ms is not None:
            raise click.UsageError(
                f"--decode-ms must go with --closed-loop, got {decode_ms:g} without"
            )
        return {}
    try:
        rate = None if closed_loop == RECORDED else read_rate(closed_loop, RECORDED)
    except ValueError as error:
        raise click.UsageError(f"--closed-loop {error}") from None
    if rate is None and decode_ms is not None:
        raise click.UsageError(
            f"--decode-ms must go with a rate, got {decode_ms:g} with {RECORDED}"
        )
    decode_ns = DECODE_NS if decode_ms is None else round(decode_ms * _NS_A_MS)
    loop = "closed" if rate is not None else "recorded"
    return {"loop": loop, "rate": rate, "decode_ns": decode_ns}


loop_options = bundled(
    "loop",
    _loop,
    click.option(
        "--decode-ms",
        type=NumberRange(min=0, max=MOST_DECODE_MS),
        help="Milliseconds per token of an answer in a closed loop.  [default: "
        f"{DECODE_NS // _NS_A_MS}]",
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
