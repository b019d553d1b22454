"""What has to be the same for stored bytes to mean the same.

Equal keys mean equal bytes only within a namespace: one engine's bytes of one model with one set of
weights, one data type and one layout. Its *fingerprint* is the BLAKE2b-16 of its canonical JSON.
Each tier keeps every namespace apart, by a directory or a prefix, and the JSON beside the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvoffload._checks import check_int
from kvoffload.errors import describe

from .region import MAX_BLOCK_BYTES

__all__ = ["FINGERPRINT_BYTES", "Namespace", "weights_identity"]

FINGERPRINT_BYTES = 16
FORMAT = 1
"""Version of what a fingerprint is made of; part of it."""
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the bytes of a block depend on, besides its key.

    Every field takes part in the fingerprint. A field may hold text, numbers, booleans, None, and
    lists, tuples and dicts with text as keys of those.

    Parameters
    ----------
    model : str
        Name of the model.
    block_bytes : int
        Bytes per block, ``1 ... 2**32 - 1``.
    engine : str
        Name of the engine, and its version where that changes the bytes.
    weights : Any
        Identity of the weights; see `weights_identity`.
    kv_dtype : str
        Data type of the KV cache.
    layout : Any
        Order of the bytes within a block.
    groups : Any
        The groups of layers that share a block table.
    hash_algorithm : str
        How the engine hashes blocks into keys.
    hash_seed : Any
        Seed of these hashes.
    tokens_per_hash, tokens_per_block : int
        Tokens per key of the engine, and per block.
    parallel : Any
        Sizes and rank of the parallel groups that cut a block's bytes; None where the bytes do not
        depend on them.
    salt : str
        Anything else that keeps namespaces apart.

    Raises
    ------
    TypeError, ValueError
        If a field cannot be written as JSON, or `block_bytes` is out of bounds.
    """

    model: str
    block_bytes: int
    engine: str = ""
    weights: Any = None
    kv_dtype: str = ""
    layout: Any = ""
    groups: Any = ()
    hash_algorithm: str = ""
    hash_seed: Any = None
    tokens_per_hash: int = 0
    tokens_per_block: int = 0
    parallel: Any = None
    salt: str = ""
    _json: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        check_int("block_bytes", self.block_bytes, 1, MAX_BLOCK_BYTES)
        fields = {field.name: getattr(self, field.name) for field in dataclass_fields(self)}
        del fields["_json"]
        for name, value in fields.items():
            _check_plain(name, value)
        text = json.dumps({"format": FORMAT, **fields}, sort_keys=True, separators=(",", ":"))
        object.__setattr__(self, "_json", text)

    @property
    def json(self) -> str:
        """The canonical JSON: keys sorted, no spaces, ASCII."""
        return self._json

    @property
    def fingerprint(self) -> bytes:
        """BLAKE2b-16 of the canonical JSON."""
        return blake2b(self._json.encode("ascii"), digest_size=FINGERPRINT_BYTES).digest()

    def __hash__(self) -> int:
        """Return the hash of the fingerprint: fields may be lists."""
        return hash(self._json)


def _check_plain(name: str, value: Any, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{name} must not be nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} must have text as keys, got {describe(key)}")
            _check_plain(f"{name}[{key!r}]", item, depth + 1)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _check_plain(f"{name}[{place}]", item, depth + 1)
    else:
        raise TypeError(
            f"{name} must hold text, numbers, lists and dicts of them, got {describe(value)}"
        )


def weights_identity(source: str | Path, revision: str | None = None) -> Any:
    """Return what tells one set of weights from another, for `Namespace.weights`.

    Parameters
    ----------
    source : str or Path
        Where the model was loaded from: a directory, or a name.
    revision : str, optional
        The revision that was asked for.

    Returns
    -------
    list or str
        Of a directory with weights, the name, size and time of change of each ``*.safetensors`` and
        of ``config.json``. Otherwise `source` and `revision`.

    Raises
    ------
    OSError
        If a file of the directory cannot be examined.
    """
    folder = Path(source)
    if folder.is_dir():
        files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
        found = [(path.name, path.stat()) for path in files]
        if found:
            return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]
    return f"{source}@{revision}" if revision else str(source)
