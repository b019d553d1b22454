"""The form of a policy's entry in the registry."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from kvoffload.errors import describe

__all__ = ["Entry", "Option"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a policy.

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
            If `value` is invalid; the message names option, rule and value.
        """
        kind: Any = type(self.default)
        noun = "an integer" if kind is int else "a number"
        kinds = (Integral if kind is int else Real, str)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{self.name} must be {noun}, got {describe(value)}")
        try:
            parsed: int | float = kind(value)
        except (ValueError, OverflowError):
            raise ValueError(f"{self.name} must be {noun}, got {describe(value)}") from None
        if not self.minimum <= parsed <= self.maximum:
            raise ValueError(
                f"{self.name} must be in {self.minimum} ... {self.maximum}, got {describe(value)}"
            )
        return parsed


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy: its names, its options, and the facts that other modules need.

    Attributes
    ----------
    name : str
        Name in configuration and on the command line.
    class_name : str
        Name of the class in both twins, ``_<stem>_py`` and ``_<stem>_c`` of this package.
    summary : str
        One line for help texts.
    simplicity : int
        Rank among the policies, 1 for the simplest: how much one must know to explain why a block
        left.
    explained_by : str
        One sentence on what one must know for that. It does not depend on the policy's hits.
    stem : str
        Stem of the files of its twins; by default its name with underscores.
    options : tuple of Option
        Keywords of the constructor besides ``cache_capacity``.
    learns_by_request : bool
        Whether it learns from whole requests; policies of the table that do also decline stores.
    learns_from_ghosts : bool
        Whether it learns from a use of a block that has left.
    vllm : {"lru", "arc", ""}
        The policy of vLLM whose every decision it makes; empty for none.
    ranks_by_return : bool
        Whether it ranks blocks by the time at which clients say that their session returns; every
        policy evicts the blocks of ended sessions first.
    tail_first : str
        Whether the blocks of a prompt leave before those that they continue: ``"always"``,
        ``"in each list"`` of several, or ``"never"``.
    scales : bool
        Whether a small cache that serves a sample of the blocks has the hit ratio of a large one.
    warm_up_blocks : int
        Number of requested blocks after which it has learned; 0 if it learns nothing.
    """

    name: str
    class_name: str
    summary: str
    simplicity: int
    explained_by: str
    stem: str = ""
    options: tuple[Option, ...] = ()
    learns_by_request: bool = False
    learns_from_ghosts: bool = False
    vllm: Literal["lru", "arc", ""] = ""
    ranks_by_return: bool = False
    tail_first: Literal["always", "in each list", "never"] = "always"
    scales: bool = True
    warm_up_blocks: int = 0

    def __post_init__(self) -> None:
        if not self.stem:
            object.__setattr__(self, "stem", self.name.replace("-", "_"))

    def check(self, name: str, value: str) -> int | float:
        """Return the value of the option `name` from its text; ValueError if it is unknown."""
        return self.option(name).check(value)

    def option(self, name: str) -> Option:
        """Return the option `name`.

        Raises
        ------
        ValueError
            If the policy has no such option; the message lists the options it has.
        """
        for option in self.options:
            if option.name == name:
                return option
        known = ", ".join(option.name for option in self.options) or "none"
        known += "; use hit-density" if name == "hints" else ""  # lru?hints=1 of 0.4
        raise ValueError(f"{self.name} has no option {describe(name)} (known: {known})")
