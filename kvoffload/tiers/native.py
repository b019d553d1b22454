"""The compiled parts below all tiers: the pool of threads, its stores, sums and seals."""

from __future__ import annotations

import importlib
from typing import Any

from kvoffload._implementation import require_compiled


class _Extension:
    """``kvoffload._core.io``, imported when it is first used."""

    def __getattr__(self, name: str) -> Any:
        require_extensions()
        found = getattr(importlib.import_module("kvoffload._core.io"), name)
        setattr(self, name, found)
        return found


def require_extensions() -> None:
    """Raise MissingExtraError, which says why, if the extensions are not in use."""
    require_compiled("a tier")


io: Any = _Extension()
