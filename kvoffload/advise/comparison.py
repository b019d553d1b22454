"""Changes from earlier advice: in the question, the trace and the recommendation.

Both are objects that ``kvoffload advise --json`` prints, in this version or an earlier one, and of
one kind: on one engine, or on several.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload._printable import printable
from kvoffload.errors import describe

from .units import bytes_text, change_text, count_text, duration_text, percent_text

MOST_BYTES = 2**26
"""Largest file that is read; 256 engines and many routers take some megabytes."""

MOST_NUMBER = 2**63
_RULE = "file must be the output of kvoffload advise --json"


class _Value(NamedTuple):
    """A compared value: its types, its text if it is not None, and its name in JSON."""

    types: tuple[type, ...]
    text: Callable[[Any], str] = "{:,}".format
    name: str = ""  # of a field of the advice; if there is none, it is found otherwise


_NONE = type(None)
_TEXT, _SIZE, _SHARE = (str, _NONE), (int, _NONE), (float, int, _NONE)
_ASKED = {
    "engines": _Value((int,), name="engines"),
    "model": _Value(_TEXT, printable, "model"),
    "host memory asked for": _Value((int,), bytes_text, "memory"),
    "accelerator's cache": _Value((int,), bytes_text, "device_memory"),
    "tokens per block": _Value((int,), name="block_tokens"),
    "bytes per block": _Value((int,), bytes_text, "block_bytes"),
    "requests": _Value((int,), name="requests"),
    "distinct blocks": _Value((int,), name="unique_blocks"),
    "reuse": _Value((float, int), percent_text, "unbounded_hit_ratio"),
}
_OF_FLEET = {
    "router": _Value(_TEXT, printable, "router"),
    "policy": _Value(_TEXT, printable, "policy"),
    "host memory": _Value(_SIZE, bytes_text, "memory"),
    "tier": _Value(_TEXT, printable, "tier"),
    "hit ratio": _Value(_SHARE, percent_text, "token_hit_ratio"),
    "prefill saved": _Value(_SHARE, percent_text, "saved"),
}
_VALUES = {
    **(_ASKED | _OF_FLEET),
    "accelerators": _Value(_TEXT, printable),
    "disk": _Value(_SIZE, bytes_text),
    "tokens saved": _Value(_SIZE, count_text),
    "time gained": _Value(_SHARE, duration_text),
}


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs: its name, and both values as ``--json`` prints them."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        value = _VALUES[self.name]
        unknown = "none" if value.types == _TEXT else "-"
        both = (self.now, self.before)
        now, before = (unknown if one is None else value.text(one) for one in both)
        text = f"{self.name} {now}, was {before}"
        if value.text is percent_text and None not in both:  # shares differ by points
            text += f" ({change_text(self.now - self.before)} points)"
        return text


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes since earlier advice.

    Attributes
    ----------
    path : str
        The file of the earlier advice.
    version : str
        The version that printed it.
    changes : tuple of Change
        Those of the question, then of the trace, then of the recommendation and its results.
    """

    path: str
    version: str
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        since = f"Since {printable(self.path)} (kvoffload {printable(self.version)})"
        if not self.changes:
            return f"{since} nothing has changed."
        return f"{since}: {'; '.join(map(str, self.changes))}."


def read_advice(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read advice that ``--json`` printed.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is not such advice.
    """
    with Path(path).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"file must have at most {MOST_BYTES:,} bytes, got more")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"{_RULE}, got no JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{_RULE}, got {describe(value)}")
    _values_of(value)
    return value


def compared_advice(
    path: str | os.PathLike[str], before: Mapping[str, Any], now: Mapping[str, Any]
) -> Comparison:
    """Compare two pieces of advice as ``--json`` prints them.

    Raises
    ------
    ValueError
        If one is on one engine and the other on several, or a value has the wrong type.
    """
    if ("engines" in before) != ("engines" in now):
        kinds = ["several engines" if "engines" in one else "one engine" for one in (now, before)]
        raise ValueError(f"file must have advice on {kinds[0]}, got advice on {kinds[1]}")
    old, new = _values_of(before), _values_of(now)
    both = [name for name in new if name in old]
    changes = [Change(name, old[name], new[name]) for name in both if old[name] != new[name]]
    return Comparison(os.fspath(path), str(before["version"]), tuple(changes))


def _values_of(advice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compared values of advice, by name."""
    of = _Fields(advice)
    of.get("version", str)
    is_fleet = "engines" in advice
    found = {
        label: of.get(one.name, *one.types)
        for label, one in _ASKED.items()
        if is_fleet or label != "engines"
    }
    if is_fleet:
        chosen = of.get("recommendation", dict, _NONE)
        for label, one in _OF_FLEET.items():
            found[label] = None if chosen is None else _Fields(chosen).get(one.name, *one.types)
        return found
    policy = of.get("recommendation", *_TEXT)
    if "engine" in of:
        engine = of.part("engine")
        name = engine and engine.get("accelerator", *_TEXT)
        workers = engine.get("workers", int) if engine and name else 0
        found["accelerators"] = f"{workers:,} × {name}" if name else None
    if "details" in of:
        details = of.part("details")
        disk = details and details.part("disk")
        found["disk"] = disk and disk.get("size", int)
    found |= {"policy": policy, "hit ratio": None, "tokens saved": None}
    for place in map(_Fields, of.get("memories", list)):
        if policy is not None and place.get("memory", int) == found["host memory asked for"]:
            cell = _Fields(_Fields(place.get("policies", dict)).get(policy, dict))
            found["hit ratio"] = cell.get("hit_ratio", float, int)
            found["tokens saved"] = cell.get("saved_tokens", int)
            if "net_seconds" in cell:
                found["time gained"] = cell.get("net_seconds", *_SHARE)
    return found


class _Fields:
    """The fields of an object from an untrusted file."""

    def __init__(self, value: Any) -> None:
        self._value = value if isinstance(value, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        """Return whether a field is there, which earlier versions may not print."""
        return name in self._value

    def part(self, name: str) -> _Fields | None:
        """Return the fields of an object, or None where it is null."""
        value = self.get(name, dict, _NONE)
        return None if value is None else _Fields(value)

    def get(self, name: str, *types: type) -> Any:
        """Return a field; it must be present, of a type, and no number beyond 63 bits."""
        value = self._value.get(name, self)
        fits = not isinstance(value, (int, float)) or abs(value) < MOST_NUMBER
        if not isinstance(value, types) or isinstance(value, bool) or not fits:
            what = "none" if value is self else describe(value)
            raise ValueError(f"{_RULE}, got {what} for {name!r}")
        return value
