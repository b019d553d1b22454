"""Sizes as text, such as ``2TB``, ``64 GiB`` or ``4096``, for commands, tiers and vLLM's keys."""

from __future__ import annotations

import re
from fractions import Fraction

from kvoffload._checks import check_int
from kvoffload.errors import describe

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)


def read_size(text: str, *, needs_unit: bool = False) -> int | None:
    """Return a size in bytes, rounded down, or None if the text is not a size.

    The units are ``B`` to ``TB`` and ``KiB`` to ``TiB``; `needs_unit` refuses a number without one.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (needs_unit and not match[2]):
        return None
    return int(Fraction(match[1]) * unit)


def parse_size(text: str) -> int:
    """Return a number of bytes, with or without a unit; ValueError if the text is not a size."""
    size = read_size(text.strip())
    if size is None:
        raise ValueError(f"must be bytes, as 4096, 2TB or 512GiB, got {describe(text)}")
    return size


def check_size(name: str, value: int | str, minimum: int = 0) -> int:
    """Return a number of bytes, >= `minimum`, given as an integer or as text."""
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return check_int(name, value, minimum)
