"""XXH3-64: compiled, or from the ``xxhash`` package where the extensions are not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvoffload import IMPLEMENTATION
from kvoffload._extras import require

__all__ = ["xxh3_64"]


if TYPE_CHECKING:

    def xxh3_64(data: Any, seed: int = 0) -> int:
        """Return the XXH3-64 of a buffer; large ones without the interpreter's lock."""
        ...

elif IMPLEMENTATION == "python":
    xxh3_64 = require("xxhash", "kvoffload.tiers without the extensions", "tiers").xxh3_64_intdigest
else:
    from kvoffload._core.io import xxh3_64
