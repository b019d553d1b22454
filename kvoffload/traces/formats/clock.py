"""Times of logs: Unix time in any unit, ISO 8601, and the dates of e-mails and of web servers."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime

from kvoffload.traces.errors import BadLineError

from .base import kind_of

MOST_SECONDS = 10**11  # from here on a time is in milliseconds, and so on
_MOST_TIME = 10**21  # any unit
_UNITS = 3  # smaller ones: milliseconds, microseconds, nanoseconds
_NUMBER = re.compile(r"\d{1,20}(?:\.\d{1,20})?", re.ASCII)
_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?"
    r" ?(?:Z|UTC|([+-])(\d\d):?(\d\d)?)?",
    re.ASCII | re.IGNORECASE,
)
# Sun, 06 Nov 1994 08:49:37 GMT; 06/Nov/1994:08:49:37 +0000
_DATE = re.compile(
    r"(?:[a-z]{3}, )?(\d\d?)[ /]([a-z]{3})[ /](\d{4})[ :](\d\d:\d\d:\d\d) (GMT|UTC|[+-]\d{4})",
    re.ASCII | re.IGNORECASE,
)


def unix_seconds(value: object, name: str) -> float:
    """Return a time as Unix time, seconds; BadLineError, without the value, if it is none."""
    if isinstance(value, str):
        text = value.strip()
        value = float(text) if _NUMBER.fullmatch(text) else _iso(text)
    if type(value) in (int, float) and value < _MOST_TIME:  # type: ignore[operator]
        seconds: float = value  # type: ignore[assignment]
        for _ in range(_UNITS):
            if seconds >= MOST_SECONDS:
                seconds /= 1000
        if 0 <= seconds < MOST_SECONDS:
            return float(seconds)
    elif isinstance(value, datetime):
        return max(0.0, value.timestamp())
    found = kind_of(value)
    if type(value) in (int, float, str):
        found = "another string" if isinstance(value, str) else "another number"
    raise BadLineError(f"{name} must be Unix time or a time as in ISO 8601, got {found}")


def _iso(text: str) -> datetime | str:
    """Return the time of a text as in ISO 8601, UTC if it names no zone, or with a month's name.

    Otherwise return the text.
    """
    match = _ISO.fullmatch(text)
    if match is None:
        return _date(text)
    year, month, day, hour, minute = map(int, match.groups()[:5])
    second, fraction = int(match[6] or 0), int((match[7] or "0").ljust(6, "0")[:6])
    away = timedelta(hours=int(match[9] or 0), minutes=int(match[10] or 0))
    zone = timezone.utc
    try:
        if match[8]:
            zone = timezone(-away if match[8] == "-" else away)
        return datetime(year, month, day, hour, minute, second, fraction, zone)
    except ValueError:
        return text


def _date(text: str) -> datetime | str:
    """Return the time of a text with a month's name in English and a zone, else the text."""
    match = _DATE.fullmatch(text)
    try:
        return text if match is None else parsedate_to_datetime(" ".join(match.groups()))
    except ValueError:
        return text
