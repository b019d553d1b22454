"""The policies of a replay: built-in ones, users' own, and the ceilings.

A policy string is ``name`` or ``name?option=value``, as elsewhere, or ``module:Class`` for a user's
own `CachePolicy`, optionally followed by options in the same form, which are passed to its
constructor.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvoffload import IMPLEMENTATION, CachePolicy, CPUOffloadingManager
from kvoffload._checks import check_instance, check_num_blocks
from kvoffload._sampling import REPEATABLE, secrets_from
from kvoffload.errors import describe
from kvoffload.policies import registry

from .offline import BELADY, CEILINGS, INFINITE

if TYPE_CHECKING:
    from kvoffload.watch import Watch

MOST_NAMES = 20
"""Most names of classes that an error lists."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_CEILING_SUMMARIES = {
    BELADY: "Belady's choice with bypass, which knows the future: no policy can hit more",
    INFINITE: "a cache that keeps everything",
}


def is_own(policy: str) -> bool:
    """Return whether a policy string names a user's class."""
    return ":" in policy.partition("?")[0]


def implementation_of(policy: str) -> str:
    """Return the implementation that replays a policy: ``"python"`` for a user's class."""
    return "python" if is_own(policy) else IMPLEMENTATION


def read_policy(text: str) -> str:
    """Check that a string names a policy, and return it in its displayed form.

    If it does not, a TypeError or ValueError names the rule and the value.
    """
    check_instance("policy", text, str, "a string, where 'module:Class' names a class")
    if not is_own(text):
        try:
            return str(registry.parse(text, "policy"))
        except ValueError as error:
            path = text.partition("?")[0]
            module, _, class_name = path.rpartition(".")
            if not _are_names(*module.split("."), class_name):
                raise
            meant = f"did you mean '{module}:{class_name}'?"
            with contextlib.suppress(Exception):  # it may not be a module of policies
                has = _classes_of(importlib.import_module(path), f"{path}:")
                meant = f"policies of the module {path}: {has}"
            raise ValueError(f"{error}; {meant}") from None
    _own(text)
    return text


def summary(policy: str) -> str:
    """Return the one-line summary of a policy."""
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

    Its samples are the same every time.
    """
    with secrets_from(REPEATABLE):
        if not is_own(policy):
            return CPUOffloadingManager(block_tokens, num_blocks, policy, watch=watch)
        own, options = _own(policy)
        return CPUOffloadingManager(
            block_tokens, num_blocks, own(cache_capacity=num_blocks, **options), watch=watch
        )


def new_miniature(policy: str, num_blocks: int, *, in_steps: bool = False) -> Any:
    """Return an empty cache with a built-in policy, which serves whole requests and has no slots.

    It decides as the manager of `new_manager`. One that serves requests in steps is compiled.
    """
    check_num_blocks(num_blocks)
    with secrets_from(REPEATABLE):
        spec = registry.parse(policy)
        if in_steps:
            module = importlib.import_module(f"{__package__}._stepped_c")
            return module.SteppedMiniature(spec.build("c", num_blocks))
        return spec.new_miniature("py" if IMPLEMENTATION == "python" else "c", num_blocks)


def _own(policy: str) -> tuple[Any, dict[str, int | float]]:
    """Return the class that ``module:Class`` names, and options that its constructor takes."""
    own, options = _own_class(policy), registry.parse_options(policy, "policy", _number)
    try:
        parameters = inspect.signature(own).parameters.values()
    except ValueError:  # a constructor without a signature
        return own, options
    if any(one.kind == one.VAR_KEYWORD for one in parameters):
        return own, options
    takes = {one.name: one.default for one in parameters if one.kind in _BY_NAME}
    wrong = [] if "cache_capacity" in takes else ["must take cache_capacity"]
    takes.pop("cache_capacity", None)
    wrong += [f"has no option {name!r}" for name in options if name not in takes]
    for name, default in takes.items():
        if default is inspect.Parameter.empty and name not in options:
            wrong.append(f"must have option {name!r}")
    if wrong:
        known = ", ".join(takes) or "none"
        raise ValueError(f"policy {policy!r} {wrong[0]}; {own.__name__} takes {known}")
    return own, options


def _own_class(policy: str) -> Any:
    """Import the class that ``module:Class`` names."""
    module_name, _, class_name = policy.partition("?")[0].partition(":")
    if not _are_names(*module_name.split("."), class_name):
        raise ValueError(f"policy must be NAME or MODULE:CLASS, got {describe(policy)}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and missing.partition(".")[0] == "examples":
            reason += "; the root of a clone has examples"
        raise ValueError(f"policy {policy!r} must be importable, got {reason}") from error
    found = getattr(module, class_name, None)
    if not _is_policy_class(found):
        got = describe(found) if hasattr(module, class_name) else f"no {class_name}"
        raise ValueError(
            f"policy {policy!r} must name a subclass of kvoffload.CachePolicy, got {got}; "
            f"{module_name} has {_classes_of(module)}"
        )
    return found


def _classes_of(module: ModuleType, before: str = "") -> str:
    """Return the names of the policies in a module, as text; ``"none"`` if it has none."""
    own = sorted(name for name, value in vars(module).items() if _is_policy_class(value))
    return ", ".join(before + name for name in own[:MOST_NAMES]) or "none"


def _are_names(*parts: str) -> bool:
    return all(part.isidentifier() for part in parts)


def _is_policy_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, CachePolicy) and value is not CachePolicy


def _number(name: str, text: str) -> int | float:
    """Return the value of an option for a user's class, whose constructor checks it."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if math.isfinite(value):
                return value
    raise ValueError(f"option {name} must be a number, got {describe(text)}")
