"""The policies that a replay takes: built-in ones, the user's own, and the ceilings.

A policy string is ``name`` or ``name?option=value``, as everywhere, or ``module:Class`` for a
`CachePolicy` of the user's, with the same options after it, which are passed to its constructor.
"""

from __future__ import annotations

import importlib
import inspect
import math
from typing import TYPE_CHECKING, Any

from kvoffload import IMPLEMENTATION, CachePolicy, CPUOffloadingManager
from kvoffload.errors import describe
from kvoffload.policies import registry

from .offline import BELADY, CEILINGS, INFINITE

if TYPE_CHECKING:
    from kvoffload.watch import Watch

__all__ = ["implementation_of", "is_own", "new_manager", "read_policy", "summary"]

MOST_NAMES = 20
"""Names of classes that an error lists at most."""
_CEILING_SUMMARIES = {
    BELADY: "Belady's choice with bypass, which knows the future: no policy can hit more",
    INFINITE: "a cache that keeps everything",
}


def is_own(policy: str) -> bool:
    """Return whether a policy string names a class of the user's."""
    return ":" in policy.partition("?")[0]


def implementation_of(policy: str) -> str:
    """Return which implementation replays a policy: ``"python"`` for a class of the user's."""
    return "python" if is_own(policy) else IMPLEMENTATION


def read_policy(text: str) -> str:
    """Check that a string names a policy, and return it as it is shown.

    Raises
    ------
    TypeError, ValueError
        If it does not; the message names the rule and the value.
    """
    if not is_own(text):
        try:
            return str(registry.parse(text))
        except ValueError as error:
            module, _, class_name = text.partition("?")[0].rpartition(".")
            if not _are_names(*module.split("."), class_name):
                raise
            raise ValueError(f"{error}; did you mean '{module}:{class_name}'?") from None
    _own_class(text)
    _own_options(text)
    return text


def summary(policy: str) -> str:
    """Return what a policy does, in one line."""
    if policy in CEILINGS:
        return _CEILING_SUMMARIES[policy]
    if not is_own(policy):
        return registry.parse(policy).entry.summary
    text = inspect.getdoc(_own_class(policy)) or ""
    return text.partition("\n")[0].strip() or "a class of one's own"


def new_manager(
    policy: str, num_blocks: int, block_tokens: int = 1, watch: Watch | None = None
) -> CPUOffloadingManager:
    """Return an empty manager with a policy, and with a watch if one is given.

    Raises
    ------
    TypeError, ValueError
        If the policy, its options or the capacity are wrong.
    """
    if not is_own(policy):
        return CPUOffloadingManager(block_tokens, num_blocks, policy, watch=watch)
    own = _own_class(policy)(cache_capacity=num_blocks, **_own_options(policy))
    return CPUOffloadingManager(block_tokens, num_blocks, own, watch=watch)


def _own_class(policy: str) -> Any:
    """Import the class that ``module:Class`` names."""
    module_name, _, class_name = policy.partition("?")[0].partition(":")
    if not _are_names(*module_name.split("."), class_name):
        raise ValueError(f"policy must be NAME or MODULE:CLASS, got {describe(policy)}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"policy {policy!r} must be importable, got {reason}") from error
    found = getattr(module, class_name, None)
    if not _is_policy_class(found):
        got = describe(found) if hasattr(module, class_name) else f"no {class_name}"
        own = [name for name, value in vars(module).items() if _is_policy_class(value)]
        has = ", ".join(sorted(own)[:MOST_NAMES]) or "none"
        raise ValueError(
            f"policy {policy!r} must name a subclass of kvoffload.CachePolicy, got {got}; "
            f"{module_name} has {has}"
        )
    return found


def _are_names(*parts: str) -> bool:
    return all(part.isidentifier() for part in parts)


def _is_policy_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, CachePolicy) and value is not CachePolicy


def _own_options(policy: str) -> dict[str, int | float]:
    """Return the options for a class of the user's; its constructor checks them."""
    _, question, rest = policy.partition("?")
    options: dict[str, int | float] = {}
    for part in rest.split("&") if question else ():
        name, _, value = part.partition("=")
        if not name.isidentifier() or name in options:
            raise ValueError(f"policy options must read option=value, once each, got {policy!r}")
        options[name] = _number(value, policy)
    return options


def _number(text: str, policy: str) -> int | float:
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    raise ValueError(f"policy options must be numbers, got {text!r} in {policy!r}")
