"""Bytes as the values of the command's options: what is read can be read again, or one error.

The first byte chooses the option; the rest is its value, as UTF-8 with bad bytes escaped, which is
how an operating system hands arguments to Python.
"""

from __future__ import annotations

from collections.abc import Callable

import click

from kvoffload._sizes import parse_size
from kvoffload.cli._fleet_options import read_engines, read_prices, read_router, read_shared
from kvoffload.cli._options import read_capacity, read_policy, read_policy_or_ceiling

LONGEST = 600
"""Characters that a message has at most beside the value, each of which may take 10, escaped."""

READERS: tuple[Callable[[str], object], ...] = (
    read_router,
    read_shared,
    read_prices,
    read_engines,
    read_capacity,
    read_policy,
    read_policy_or_ceiling,
    parse_size,
)
CANONICAL = (read_router,)
"""Readers whose result is the text of the same value."""


def run_options(data: bytes) -> int:
    """Read the value that the bytes stand for; return 1 if it is one, 0 if not."""
    reader = READERS[data[0] % len(READERS)] if data else READERS[0]
    text = data[1:].decode("utf-8", "surrogateescape")
    try:
        value = reader(text)
    except (ValueError, click.UsageError) as error:
        message = error.message if isinstance(error, click.UsageError) else str(error)
        if not message.isprintable() or len(message) > LONGEST + 10 * len(text):
            raise AssertionError(f"no message for one line: {message!r}") from error
        return 0
    if reader in CANONICAL and reader(str(value)) != value:
        raise AssertionError(f"{text!r} is read as {value!r}, which is read as something else")
    return 1
