"""Former names of modules and classes, which work with a warning until they are removed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["former_attribute", "former_names"]


def former_names(module: str, names: Mapping[str, tuple[Any, str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module whose former names are these.

    Each name maps to its object, and to the replacement to name in the warning.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value, instead = names[name]
        text = f"{module}.{name} goes in 0.5: {instead}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return value

    return find


def former_attribute(owner: str, former: str, present: str) -> Any:
    """Return a property that warns and returns the attribute of the present name."""

    def value(self: object) -> Any:
        text = f"{owner}.{former} is called {present}; the name goes in 0.5"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(self, present)

    return property(value)
