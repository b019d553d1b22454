"""Names that a module has had: they work, with a warning, until the release that ends them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["former_names"]


def former_names(module: str, names: Mapping[str, tuple[Any, str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module whose former names are these.

    Parameters
    ----------
    module : str
        The module's ``__name__``.
    names : mapping
        Former name -> what it stands for, and what to use instead.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value, instead = names[name]
        text = f"{module}.{name} goes in 0.5: {instead}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return value

    return find
