"""The names of the policies, their options, and the text form ``name?option=value&option=value``.

One table for both twins, the command line and configuration. It imports no policy.
"""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvoffload.errors import describe

from .base import CachePolicy

__all__ = ["Entry", "Option", "PolicySpec", "entry", "is_builtin", "load", "names", "parse"]


@dataclass(frozen=True, slots=True)
class Option:
    """Describe one option of a policy.

    Attributes
    ----------
    name : str
        Keyword of the policy's constructor.
    default : int or float
        Its type is the option's type.
    minimum, maximum : int or float
        Inclusive bounds.
    summary : str
        One line for help texts.
    """

    name: str
    default: int | float
    minimum: int | float
    maximum: int | float
    summary: str

    def check(self, value: Any) -> int | float:
        """Return `value`, a number or its text, in the option's type and bounds.

        Raises
        ------
        TypeError, ValueError
            If it is not one; the message names option, rule and value.
        """
        kind = type(self.default)
        noun = "an integer" if kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError(f"{self.name} must be {noun}, got {describe(value)}")
        if kind is int and isinstance(value, float):
            raise TypeError(f"{self.name} must be {noun}, got {describe(value)}")
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            raise ValueError(f"{self.name} must be {noun}, got {describe(value)}") from None
        if math.isnan(number) or not self.minimum <= number <= self.maximum:
            raise ValueError(
                f"{self.name} must be in {self.minimum} ... {self.maximum}, got {describe(value)}"
            )
        return number


@dataclass(frozen=True, slots=True)
class Entry:
    """Describe one policy.

    Attributes
    ----------
    name : str
        What users write.
    stem : str
        The twins are ``_<stem>_py`` and ``_<stem>_c`` in this package.
    class_name : str
        Name of the class in both.
    summary : str
        One line for help texts.
    options : tuple of Option
        Keywords of the constructor besides ``cache_capacity``.
    """

    name: str
    stem: str
    class_name: str
    summary: str
    options: tuple[Option, ...] = ()

    def option(self, name: str) -> Option:
        """Return the option `name`.

        Raises
        ------
        ValueError
            If the policy has none of that name; the message lists those it has.
        """
        for option in self.options:
            if option.name == name:
                return option
        known = ", ".join(option.name for option in self.options) or "none"
        raise ValueError(f"policy {self.name!r} has no option {name!r} (known: {known})")


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Name a policy together with its options.

    Attributes
    ----------
    entry : Entry
        The policy.
    options : mapping of str to int or float
        Options that were given, checked.
    """

    entry: Entry
    options: Mapping[str, int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        given = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.entry.name}?{given}" if given else self.entry.name


_ENTRIES = (
    Entry("lru", "lru", "LRUCachePolicy", "least recently used leaves first"),
    Entry("arc", "arc", "ARCCachePolicy", "adaptive replacement as vLLM has it"),
    Entry(
        "arc-classic",
        "arc_classic",
        "ARCClassicCachePolicy",
        "adaptive replacement as published",
    ),
    Entry(
        "slru",
        "slru",
        "SLRUCachePolicy",
        "LRU in two segments: blocks seen again are protected",
        (Option("protected", 0.5, 0.0, 1.0, "share of the capacity for blocks seen again"),),
    ),
    Entry("lfu", "lfu", "LFUCachePolicy", "least frequently used leaves first, counts age"),
    Entry(
        "sieve", "sieve", "SieveCachePolicy", "oldest not used since the hand last passed leaves"
    ),
    Entry(
        "s3fifo",
        "s3fifo",
        "S3FIFOCachePolicy",
        "new blocks that are not used soon leave first, by three FIFO queues",
        (Option("small", 0.1, 0.0, 1.0, "share of the capacity for new blocks"),),
    ),
    Entry(
        "hit-density",
        "hit_density",
        "HitDensityCachePolicy",
        "fewest expected hits per slot leave first; what is sparser is not stored",
        (
            Option("ghosts", 3.5, 0.0, 16.0, "ghosts for each block of the capacity"),
            Option("guard", 1, 0, 1, "1: follow LRU or ARC while a sample does better under it"),
        ),
    ),
)
_BY_NAME = {entry.name: entry for entry in _ENTRIES}


def names() -> tuple[str, ...]:
    """Return the names of all policies, in the order of the documentation."""
    return tuple(_BY_NAME)


def entry(name: str) -> Entry:
    """Return the entry of a policy.

    Raises
    ------
    ValueError
        If there is none of that name; the message lists the known ones and the nearest.
    """
    found = _BY_NAME.get(name)
    if found is None:
        near = difflib.get_close_matches(name.casefold(), _BY_NAME, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(_BY_NAME)
        raise ValueError(f"cache_policy must be one of {known}, got {describe(name)}{hint}")
    return found


def parse(text: str) -> PolicySpec:
    """Read a policy string: ``name`` or ``name?option=value&option=value``.

    Raises
    ------
    ValueError
        If the policy or an option is unknown, given twice, malformed or out of bounds.
    """
    name, question, rest = text.partition("?")
    found = entry(name)
    options: dict[str, int | float] = {}
    for part in rest.split("&") if question else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(
                f"cache_policy options must read option=value, got {describe(part)} "
                f"in {describe(text)}"
            )
        if key in options:
            raise ValueError(f"cache_policy option {key!r} must be given once, got {text!r}")
        options[key] = found.option(key).check(value)
    return PolicySpec(found, options)


def load(found: Entry, twin: Literal["py", "c"]) -> type[CachePolicy]:
    """Return the class of a policy, in Python (``"py"``) or compiled (``"c"``)."""
    module = importlib.import_module(f"{__package__}._{found.stem}_{twin}")
    policy_class: type[CachePolicy] = getattr(module, found.class_name)
    return policy_class


def is_builtin(policy_class: type, twin: Literal["py", "c"]) -> bool:
    """Tell whether a class is itself a registered twin, not a subclass of one."""
    return any(
        getattr(sys.modules.get(f"{__package__}._{known.stem}_{twin}"), known.class_name, None)
        is policy_class
        for known in _ENTRIES
    )
