"""What several commands take: traces, sizes, capacities, lists, policies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import click

from kvoffload.traces.formats import FORMS

MAX_BLOCKS = 2**31 - 1
_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*|%)", re.ASCII)

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])


def read_unit(text: str) -> int | None:
    """Read a size with its unit, such as ``64GiB`` or ``5 GB``; bytes, None if it is not one."""
    match = _NUMBER.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    return None if match is None or unit is None else int(Fraction(match[1]) * unit)


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity as it was asked for; one of the three is set.

    Attributes
    ----------
    text : str
        What was written.
    blocks : int or None
        Number of blocks.
    size : int or None
        Bytes.
    percent : Fraction or None
        Share of the unique blocks.
    """

    text: str
    blocks: int | None = None
    size: int | None = None
    percent: Fraction | None = None

    def resolve(
        self, block_bytes: int | None, unique_blocks: int | None, option: str = "--capacity"
    ) -> int:
        """Return the number of blocks, at least 1; `option` is what messages call it.

        Raises
        ------
        click.UsageError
            If it comes to no block, or to more than a manager can have.
        """
        if self.size is not None:
            blocks = self.size // (block_bytes or 1)
            means = f"{self.size:,} bytes / {block_bytes:,} bytes a block"
        elif self.percent is not None:
            blocks = int(self.percent * (unique_blocks or 0) / 100)
            means = f"{self.text} of {unique_blocks:,} unique blocks"
        else:
            blocks = self.blocks or 0
            means = self.text
        if not 1 <= blocks <= MAX_BLOCKS:
            rule = f"must come to 1 ... {MAX_BLOCKS} blocks"
            raise click.UsageError(f"{option} {rule}, got {blocks} ({means})")
        return blocks


def read_capacity(text: str) -> Capacity:
    """Read a capacity: blocks, a size in bytes or a percentage.

    Raises
    ------
    ValueError
        If it is none of them.
    """
    size = read_unit(text)
    if size is not None:
        return Capacity(text, size=size)
    match = _NUMBER.fullmatch(text)
    if match and match[2] == "%":
        return Capacity(text, percent=Fraction(match[1]))
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        if not 1 <= int(text) <= MAX_BLOCKS:
            raise ValueError(f"must be 1 ... {MAX_BLOCKS} blocks, got {text}")
        return Capacity(text, blocks=int(text))
    raise ValueError(
        f"must be blocks (4096), a share of the unique blocks (5%) or a size (64GiB), got {text!r}"
    )


def read_size(text: str) -> int:
    """Read a number of bytes, with or without a unit.

    Raises
    ------
    ValueError
        If it is not one, or below 1.
    """
    size = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else read_unit(text)
    if size is None or size < 1:
        raise ValueError(f"must be bytes >= 1, as 2097152 or 2MiB, got {text!r}")
    return size


def value_of(read: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a click callback that reads an option's text."""

    def callback(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else read(text.strip())
        except (TypeError, ValueError) as error:
            raise click.BadParameter(str(error)) from None

    return callback


def values_of(read: Callable[[str], Any]) -> Callable[..., tuple[Any, ...]]:
    """Return a click callback that reads a repeated option of comma lists as one tuple."""
    read_one = value_of(read)

    def callback(
        ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
    ) -> tuple[Any, ...]:
        return tuple(read_one(ctx, param, part) for text in texts for part in text.split(","))

    return callback


def reading_options(function: CommandFunction) -> CommandFunction:
    """Add the options of every command that reads a trace."""
    for option in (
        click.option("--quiet", is_flag=True, help="Print the result only: no progress, no notes."),
        click.option("--skip-bad", is_flag=True, help="Go on past bad lines and say how many."),
        click.option(
            "--limit", type=click.IntRange(min=1), help="Read this many requests at most."
        ),
        click.option(
            "--format",
            "form",
            type=click.Choice(list(FORMS)),
            help="Form of the trace; recognised if not given.",
        ),
    ):
        function = option(function)
    return function


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Which of the possible generated workloads.",
)
