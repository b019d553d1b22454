"""The policies by name, and their text form ``name?option=value&option=value``.

The table of `builtin` serves both twins, the command line and configuration. Importing this module
imports no policy.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from kvoffload._checks import check_instance, check_word
from kvoffload.errors import describe

from .base import CachePolicy
from .builtin import _ENTRIES
from .entries import Entry, Option

__all__ = [
    "Entry",
    "Option",
    "PolicySpec",
    "entry",
    "entry_of",
    "is_builtin",
    "load",
    "names",
    "parse",
    "parse_options",
]

Value = TypeVar("Value")

_BY_NAME = {entry.name: entry for entry in _ENTRIES}


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy together with its options.

    Attributes
    ----------
    entry : Entry
        The policy.
    options : mapping of str to int or float
        The given options, checked.
    """

    entry: Entry
    options: Mapping[str, int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        given = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.entry.name}?{given}" if given else self.entry.name

    def build(self, twin: Literal["py", "c"], cache_capacity: int) -> CachePolicy:
        """Return the described policy, in Python (``"py"``) or compiled (``"c"``)."""
        found: Any = load(self.entry, twin)
        policy: CachePolicy = found(cache_capacity=cache_capacity, **self.options)
        return policy

    def new_miniature(self, twin: Literal["py", "c"], cache_capacity: int) -> Any:
        """Return a miniature with the described policy; see ``_miniature_py``."""
        module = importlib.import_module(f"{__package__}._miniature_{twin}")
        return module.Miniature(self.build(twin, cache_capacity))


def names() -> tuple[str, ...]:
    """Return the names of all policies, in the order of the documentation."""
    return tuple(_BY_NAME)


def entry(name: str, argument: str = "cache_policy") -> Entry:
    """Return the entry of a policy.

    Parameters
    ----------
    name : str
        The policy.
    argument : str
        Name of the argument in errors.

    Raises
    ------
    TypeError, ValueError
        If the name is no string, or unknown; the message lists the known names and the nearest one.
    """
    return _BY_NAME[check_word(argument, name, _BY_NAME)]


def parse(text: str, argument: str = "cache_policy") -> PolicySpec:
    """Read a policy string: ``name`` or ``name?option=value&option=value``.

    Parameters
    ----------
    text : str
        The policy.
    argument : str
        Name of the argument in errors.

    Raises
    ------
    TypeError, ValueError
        If the text is no string, or the policy or an option is unknown, given twice, malformed or
        out of bounds.
    """
    name, *_ = check_instance(argument, text, str, "a string").partition("?")
    found = entry(name, argument)
    options = parse_options(text, argument, found.check)  # no closure: see `_entry_of`
    return PolicySpec(found, options)


def parse_options(text: str, argument: str, check: Callable[[str, str], Value]) -> dict[str, Value]:
    """Read the options after a name: ``?option=value&option=value``.

    `check` returns the value of an option from its text. Raises ValueError, which calls the whole
    text `argument`, if `check` does so or an option is malformed or given twice.
    """
    _, question, rest = text.partition("?")
    options: dict[str, Value] = {}
    for part in rest.split("&") if question else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(
                f"{argument} options must read option=value, got {describe(part)} "
                f"in {describe(text)}"
            )
        if key in options:
            name = describe(key)
            raise ValueError(f"{argument} option {name} must be given once, got {describe(text)}")
        try:
            options[key] = check(key, value)
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from None
    return options


def load(found: Entry, twin: Literal["py", "c"]) -> type[CachePolicy]:
    """Return the class of a policy, in Python (``"py"``) or compiled (``"c"``)."""
    module = importlib.import_module(f"{__package__}._{found.stem}_{twin}")
    policy_class: type[CachePolicy] = getattr(module, found.class_name)
    return policy_class


def is_builtin(policy_class: type, twin: Literal["py", "c"]) -> bool:
    """Return whether a class is itself a registered twin, not a subclass of one."""
    return _entry_of(policy_class, twin) is not None


def entry_of(policy_class: type) -> Entry | None:
    """Return the entry of a class that is itself a registered twin, else None."""
    return _entry_of(policy_class, "py") or _entry_of(policy_class, "c")


def _entry_of(policy_class: type, twin: str) -> Entry | None:
    # No closure: CPython 3.12 and 3.13 crash if no memory is left to create one.
    for known in _ENTRIES:
        module = sys.modules.get(f"{__package__}._{known.stem}_{twin}")
        if getattr(module, known.class_name, None) is policy_class:
            return known
    return None
