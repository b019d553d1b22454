"""The namespace of stored blocks: everything that their bytes depend on besides their keys.

Equal keys mean equal bytes only within a namespace: the bytes of one engine for one model with one
set of weights, one data type and one layout. Its *fingerprint* is the BLAKE2b-16 of its canonical
JSON. Each tier separates namespaces with a directory or a prefix, and keeps the JSON beside the
data.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvoffload._checks import check_instance, check_int
from kvoffload.errors import describe

from .base import TierError
from .folder import Folder
from .region import MAX_BLOCK_BYTES

NAMESPACE = "namespace.json"
"""Name of the file with the JSON in the folder of a namespace."""

FINGERPRINT_BYTES = 16
MAX_JSON_BYTES = 2**20
"""Most bytes of the JSON of others that are read."""
FORMAT = 1
"""Version of the fingerprint's inputs, and part of it."""
_MAX_DEPTH = 8
_MAX_BITS = 4096
"""Most bits of a number; Python refuses to format much larger ones."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".index.json")
_END_BYTES = 2**16
_PAGES, _PAGE_BYTES = 64, 2**12
_MAX_ROWS = 1000
_MAX_ENTRIES = 100_000
"""Most files and folders of a model's directory that are examined."""
_WHOLE = {"block_bytes": (1, MAX_BLOCK_BYTES), "tokens_per_hash": (0,), "tokens_per_block": (0,)}
"""The fields that are whole numbers, and their bounds."""


@dataclass(frozen=True, slots=True, eq=False)
class Namespace:
    """Everything that the bytes of a block depend on, besides its key.

    Every field takes part in the fingerprint. A field may hold text, numbers, booleans, None, and
    lists, tuples and dicts with text as keys of those.

    Parameters
    ----------
    model : str
        Name of the model.
    block_bytes : int
        Bytes per block, ``1 ... 2**32 - 1``.
    engine : str
        Name of the engine, and its version if that changes the bytes.
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
        Tokens per key of the engine, and per block; 0 if unknown.
    parallel : Any
        Sizes and rank of the parallel groups that split a block's bytes; None if the bytes do not
        depend on them.
    salt : str
        Anything else that keeps namespaces apart.

    Raises
    ------
    TypeError, ValueError
        If a field cannot be written as JSON, or a number is out of bounds.
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
        for name, bounds in _WHOLE.items():
            object.__setattr__(self, name, check_int(name, getattr(self, name), *bounds))
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

    def __eq__(self, other: object) -> bool:
        """Return whether two have the same JSON: ``1``, ``1.0`` and ``True`` differ there."""
        if not isinstance(other, Namespace):
            return NotImplemented
        return self._json == other._json

    def __hash__(self) -> int:
        """Return the hash of the JSON, since fields may be lists."""
        return hash(self._json)


def check_namespace(namespace: Any) -> Namespace:
    """Return a namespace; TypeError if it is not a `Namespace`."""
    checked: Namespace = check_instance("namespace", namespace, Namespace, "a Namespace")
    return checked


def is_hex(name: str, nbytes: int) -> bool:
    """Return whether a name is that many bytes in hex, as the names of folders on media are."""
    return len(name) == 2 * nbytes and not set(name) - set("0123456789abcdef")


def fields_in(folder: Folder) -> dict[str, Any]:
    """Return the fields of the namespace of a folder on a medium; empty if they are invalid."""
    with contextlib.suppress(TierError, OSError, ValueError, TypeError, RecursionError):
        found = json.loads(folder.read(NAMESPACE, MAX_JSON_BYTES) or b"")
        if isinstance(found, dict):
            _check_plain("namespace", found, -1)
            return found
    return {}


def _check_plain(name: str, value: Any, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{name} must not be nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, str | bool):
        return
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise ValueError(f"{name} must have whole numbers of at most {_MAX_BITS} bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} must have text as keys, got {describe(key)}")
            _check_plain(f"{name}[{describe(key)}]", item, depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(f"{name}[{index}]", item, depth + 1)
    else:
        raise TypeError(
            f"{name} must hold text, numbers, lists and dicts of them, got {describe(value)}"
        )


def weights_identity(source: str | Path, revision: str | None = None) -> Any:
    """Return an identity of a set of weights, for `Namespace.weights`.

    Parameters
    ----------
    source : str or Path
        Source of the model: a directory, a file, or a name.
    revision : str, optional
        The requested revision.

    Returns
    -------
    list or str
        For a directory with weights, ``[name, bytes, digest]`` of each file of weights
        (``*.safetensors *.bin *.pt *.pth *.gguf *.h5``), index (``*.index.json``) and
        ``config.json`` in it and its folders, except hidden ones; for a file, its own. More than
        1,000 files are summed in one row. For anything else, `source` and `revision`.

    Raises
    ------
    OSError
        If a file cannot be read.
    TypeError, ValueError
        If `source` is neither text nor a path, or a directory with too many files for a model.

    Notes
    -----
    Equal copies have equal identities, whatever their times. A digest is the BLAKE2b-16 of a file
    of up to 384 KiB, or of the first and last 64 KiB of a longer one and 64 pages of 4 KiB at fixed
    fractions between them: it may miss a change within a 60th of a file.

    Complexity: O(files), some 400 KB read of each.
    """
    check_instance("source", source, str | Path, "a path or a name")
    path = Path(source)
    if path.is_file():
        return [_file_identity(path, path.name)]
    if path.is_dir():
        found = [_file_identity(file, name) for name, file in sorted(_weight_files(path).items())]
        if len(found) > _MAX_ROWS:
            whole = blake2b(json.dumps(found).encode("ascii"), digest_size=FINGERPRINT_BYTES)
            return [[f"{len(found)} files", sum(row[1] for row in found), whole.hexdigest()]]
        if found:
            return found
    return f"{source}@{revision}" if revision else str(source)


def _weight_files(folder: Path) -> dict[str, Path]:
    """Return the regular files that identify the weights, by their names below a folder."""
    found = {}
    left = _MAX_ENTRIES
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        left -= len(folders) + len(names)
        if left < 0:
            raise ValueError(
                f"source must be a model's directory, of {_MAX_ENTRIES} files at most, got "
                f"{describe(str(folder))}"
            )
        for name in names:
            path = Path(parent, name)
            if (name.endswith(_WEIGHTS) or name == "config.json") and path.is_file():
                found[path.relative_to(folder).as_posix()] = path
    return found


def _raise(error: OSError) -> None:
    raise error


def _file_identity(path: Path, name: str) -> list[Any]:
    """Return name, size and digest of a file."""
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for offset, count in _samples(size):
            file.seek(offset)
            digest.update(file.read(count))
    return [name, size, digest.hexdigest()]


def _samples(size: int) -> list[tuple[int, int]]:
    """Return the pieces of a file to read, ``(offset, bytes)`` each."""
    if size <= 2 * _END_BYTES + _PAGES * _PAGE_BYTES:
        return [(0, size)]
    between = size - 2 * _END_BYTES - _PAGE_BYTES
    pages = [(_END_BYTES + between * page // (_PAGES - 1), _PAGE_BYTES) for page in range(_PAGES)]
    return [(0, _END_BYTES), *pages, (size - _END_BYTES, _END_BYTES)]
