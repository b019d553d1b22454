"""Sizes, rates, shares, counts and durations as text."""

from __future__ import annotations

import re

_SIZES = ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))
_RATES = ((10**9, "GB/s"), (10**6, "MB/s"), (10**3, "kB/s"))
_COUNTS = ((10**9, "billion"), (10**6, "million"))


_NUMBER_AND_UNIT = re.compile(
    r"(?<=\d) (?=%|[KMGT]iB|[kMG]?B\b|million|billion|points|m?s\b|min\b|h\b)"
)
NO_BREAK_SPACE = "\u00a0"


def _digits(value: float) -> str:
    """Return a number with three significant digits and no trailing zeros."""
    if abs(value) < 0.005:  # never -0
        return "0"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


def _in_units(value: float, units: tuple[tuple[int, str], ...], last: str) -> str:
    for size, unit in units:
        if value >= size:
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value)} {last}".rstrip()


def bytes_text(size: float) -> str:
    """Return a size as in ``512 GiB``."""
    return _in_units(size, _SIZES, "B")


def rate_text(bytes_per_second: float | None) -> str:
    """Return a rate as in ``1.4 GB/s``; a dash if it is not known."""
    return "-" if bytes_per_second is None else _in_units(bytes_per_second, _RATES, "B/s")


def count_text(count: float) -> str:
    """Return a count as in ``53.1 million``."""
    return _in_units(count, _COUNTS, "")


def duration_text(seconds: float) -> str:
    """Return a duration, or a loss of time, as in ``48.2 min``."""
    if abs(seconds) < 120:
        return f"{_digits(round(seconds, 2))} s"
    return f"{_digits(seconds / 60)} min" if abs(seconds) < 7200 else f"{_digits(seconds / 3600)} h"


def latency_text(seconds: float) -> str:
    """Return a short time as in ``12.3 ms``; from a second on as `duration_text` does."""
    return f"{_digits(seconds * 1000)} ms" if abs(seconds) < 1 else duration_text(seconds)


def percent_text(share: float | None) -> str:
    """Return a share as in ``36.6 %``; a dash if it is not known."""
    return "-" if share is None else f"{_tenths(share):.1f} %"


def change_text(difference: float) -> str:
    """Return the difference of two shares in points, as in ``+1.5``."""
    return f"{_tenths(difference):+.1f}"


def _tenths(share: float) -> float:
    """Return a share in percent as it is shown, never -0."""
    return round(share * 100, 1) + 0.0


def unbroken(text: str) -> str:
    """Return a text in which no line may end between a number and its unit."""
    return _NUMBER_AND_UNIT.sub(NO_BREAK_SPACE, text)
