"""Blocks of prompts that are given as text or tokens: keyed hashes that do not reveal the text.

A block's hash is keyed and covers the hash of the block before it, the model, and the block's
tokens. The key is drawn for each conversion and not kept, or derived from a salt that the user
gives. Without the key it is impossible to test whether a prompt was asked. Equal prefixes still
have equal ids within one conversion or under one salt.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, pbkdf2_hmac, shake_128
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload._checks import check_int
from kvoffload.errors import describe

from .errors import BadLineError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .breaks import PrefixBreaks

ROLES = ("messages", "prompt", "system", "tools", "time", "session", "model", "output")
"""Roles that a field of a log may have."""
BLOCK_TOKENS = 16
MAX_BYTES_PER_TOKEN = 64
MAX_TOKENS_PER_IMAGE = 2**16
WHOLE_PART = 32  # bytes from which on a part without text counts in full
MARK = re.compile(r"(<[0-9a-f]{32}>)")
"""The text that stands for a part without text."""
MOST_MODELS = 256  # whose secrets are remembered
_ROUNDS = 100_000  # of the derivation of a key: a guess at a salt takes some 40 ms
_ID_BYTES = 8
_TOKEN = np.dtype("<u4")
MAX_TOKEN = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options for making blocks of prompts, for logs of requests.

    Attributes
    ----------
    tokenizer : str or os.PathLike or None
        A ``tokenizer.json`` of Hugging Face, or a folder that holds one, whose chat template is
        used then; None: tokens are approximated by bytes.
    bytes_per_token : int
        Bytes of UTF-8 that count as a token without a tokenizer, 1 ... 64.
    tokens_per_image : int
        Tokens that a part of a message without text counts as, such as a picture or a file.
    block_tokens : int or None
        Tokens per block, 16 if None. Only full blocks have an id.
    salt : str or None
        A secret from which the key of the hashes is derived: equal salts make equal ids. None: a
        key is drawn and not kept.
    fields : mapping of str to str, or None
        The fields of a log that is not recognised, or the columns of a table: dotted paths by what
        is there, ``"messages"`` or ``"prompt"``, and ``"system"``, ``"tools"``, ``"time"``,
        ``"session"``, ``"model"`` and ``"output"`` (tokens of the answer).
    delimiter : str or None
        What separates the columns of a table; None: a comma, a semicolon, a tab or a bar, as its
        first line shows.
    breaks : PrefixBreaks or None
        What looks for text that keeps prompts from sharing their beginnings.
    """

    tokenizer: str | os.PathLike[str] | None = None
    bytes_per_token: int = 4
    tokens_per_image: int = 1000
    block_tokens: int | None = None
    salt: str | None = field(default=None, repr=False)
    fields: Mapping[str, str] | None = None
    delimiter: str | None = None
    breaks: PrefixBreaks | None = field(default=None, repr=False, compare=False)
    _made: list[PromptBlocks] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("bytes_per_token", self.bytes_per_token, 1, MAX_BYTES_PER_TOKEN)
        check_int("tokens_per_image", self.tokens_per_image, 1, MAX_TOKENS_PER_IMAGE)
        if self.block_tokens is not None:
            check_int("block_tokens", self.block_tokens, 1, 2**31 - 1)
        if self.salt is not None and not self.salt:
            raise ValueError("salt must be a non-empty text, got an empty one")
        if self.fields is not None:
            _check_fields(self.fields)
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise ValueError(f"delimiter must be one character, got {describe(self.delimiter)}")

    @property
    def blocks(self) -> PromptBlocks:
        """The maker of blocks, with one key and one tokenizer for all files.

        TraceError if the tokenizer cannot be read, MissingExtraError if the extra is missing.
        """
        if not self._made:
            self._made.append(PromptBlocks(self))
        return self._made[0]


def _check_fields(fields: Mapping[str, str]) -> None:
    for role, path in fields.items():
        if role not in ROLES:
            raise ValueError(f"fields must be among {', '.join(ROLES)}, got {describe(role)}")
        if not path:
            raise ValueError(f"fields must name a field for {role}, got {describe(path)}")
    if not fields.keys() & {"messages", "prompt"}:
        rule = "fields must name one for messages or for prompt"
        raise ValueError(f"{rule}, got {describe(list(fields))}")


class PromptBlocks:
    """A maker of ids for prompts' blocks."""

    def __init__(self, options: PromptOptions) -> None:
        self.block_tokens = options.block_tokens or BLOCK_TOKENS
        self.tokens_per_image = options.tokens_per_image
        self.bytes_per_token = options.bytes_per_token
        self._tokenizer = None if options.tokenizer is None else Tokenizer(options.tokenizer)
        self.is_approximate = self._tokenizer is None  # tokens are counted by bytes
        self.template = None if self._tokenizer is None else self._tokenizer.template
        self._whose: dict[tuple[bytes, str], bytes] = {}  # secrets by model
        if options.salt is None:
            self._key = secrets.token_bytes(32)
        else:
            salt = options.salt.encode("utf-8", "surrogatepass")
            self._key = pbkdf2_hmac("sha256", salt, b"kvoffload prompts", _ROUNDS)

    def part_tokens(self, size: int) -> int:
        """Return the tokens of a part without text: fewer if it has hardly any bytes."""
        return self.tokens_per_image * min(size, WHOLE_PART) // WHOLE_PART

    def of_text(
        self, text: str, model: str, *, special: bool, marks: Mapping[str, int] | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of a text and the ids of its full blocks.

        `special`: whether the tokenizer adds the tokens with which a text begins. `marks`: texts
        from `digest` in angle brackets that stand for so many tokens.
        """
        marks = marks or {}
        pieces = MARK.split(text) if marks else [text]
        size = self.bytes_per_token
        if self._tokenizer is None:
            parts = [
                _filling(piece, size * marks[piece])
                if index % 2 and piece in marks
                else piece.encode("utf-8", "surrogatepass")
                for index, piece in enumerate(pieces)  # every other one may be a mark
            ]
            data = b"".join(parts)
            return len(data) // size, self._chained(data, size * self.block_tokens, b"bytes", model)
        tokens: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2 and piece in marks:
                tokens += np.frombuffer(_filling(piece, 4 * marks[piece]), dtype=_TOKEN).tolist()
            else:
                plain = piece.encode("utf-8", "replace").decode()
                tokens += self._tokenizer.tokens(plain, special=special and not index)
        return self.of_tokens(tokens, model)

    def of_tokens(self, tokens: Sequence[int], model: str) -> tuple[int, tuple[int, ...]]:
        """Return the number of tokens and the ids of their full blocks."""
        data = np.array(tokens, dtype=_TOKEN).tobytes()
        size = _TOKEN.itemsize * self.block_tokens
        return len(tokens), self._chained(data, size, b"tokens", model)

    def session(self, name: str) -> str:
        """Return the written name of a session, which does not reveal its own."""
        data = name.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=_ID_BYTES, key=self._key, person=b"session").hexdigest()

    def digest(self, data: bytes) -> str:
        """Return the text that stands for other data in a prompt."""
        return blake2b(data, digest_size=16, key=self._key, person=b"part").hexdigest()

    def _chained(self, data: bytes, size: int, unit: bytes, model: str) -> tuple[int, ...]:
        """Return the ids of the full blocks of `size` bytes.

        A block's hash begins with the model's, which is secret as the key is: BLAKE2b of a secret
        and a text is a keyed hash.
        """
        whose = self._whose.get((unit, model))
        if whose is None:
            if len(self._whose) >= MOST_MODELS:
                self._whose.clear()
            named = model.encode("utf-8", "surrogatepass")
            whose = blake2b(named, digest_size=32, key=self._key, person=unit).digest()
            self._whose[unit, model] = whose
        parent, digests = bytes(_ID_BYTES), []
        for start in range(0, len(data) - size + 1, size):
            parent = blake2b(
                whose + parent + data[start : start + size], digest_size=_ID_BYTES
            ).digest()
            digests.append(parent)
        ids: list[int] = (np.frombuffer(b"".join(digests), ">u8") >> np.uint64(1)).tolist()
        return tuple(ids)


def _filling(mark: str, size: int) -> bytes:
    """Return bytes that stand for those of a part."""
    return shake_128(mark.encode()).digest(size)


def check_tokens(tokens: list[Any], name: str) -> list[int]:
    """Return a list that must hold token ids; BadLineError names only the position."""
    for position, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            rule = f"{name}[{position}] must be a token id, 0 ... {MAX_TOKEN}"
            raise BadLineError(f"{rule}, got another")
    return tokens
