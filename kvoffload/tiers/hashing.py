"""XXH3-64: compiled, or from the ``xxhash`` package where the extensions are not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvoffload import IMPLEMENTATION

__all__ = ["xxh3_64"]


def _from_package() -> Any:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise ImportError(
            "kvoffload.tiers needs xxhash where the extensions are not built: "
            "pip install 'kvoffload[tiers]'",
            name="xxhash",
        ) from error
    return xxh3_64_intdigest


if TYPE_CHECKING:

    def xxh3_64(data: Any, seed: int = 0) -> int:
        """Return the XXH3-64 of a buffer; large ones without the interpreter's lock."""
        ...

elif IMPLEMENTATION == "python":
    xxh3_64 = _from_package()
else:
    from kvoffload._core.io import xxh3_64
