"""Generations: the names of weights, which separate blocks that other weights have computed.

What may be served depends on the weights that an engine has, which no medium can know. So whoever
changes the weights names them - a trainer's step, say - and the name takes part in the name of each
block on a medium and in the seed of each seal: a tier sees the blocks of its own generation and no
others. Engines with the same name share blocks, whatever their clocks; an engine that returns to
older weights finds their blocks, if they are still there. Blocks of other generations age out as
all do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from kvoffload._checks import check_instance
from kvoffload.errors import describe

from .metrics import write_line

MAX_CHARACTERS = 64
RANDOM_BYTES = 16
NUMBER_BYTES = 8
MAX_FILE_BYTES = 1024


def _open(path: str, flags: int) -> int:
    """Open a file without waiting, as for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


class Generation(NamedTuple):
    """A generation: its name, and the number that media and seals have for it."""

    name: str
    number: int  # 64 bits; 0 for ``""``

    @classmethod
    def of(cls, name: str) -> Generation:
        """Return the generation of a name of at most 64 characters.

        Raises
        ------
        TypeError, ValueError
            If it is no such text.
        """
        check_instance("generation", name, str, "text")
        if len(name) > MAX_CHARACTERS or not name.isprintable():
            raise ValueError(
                f"generation must be at most {MAX_CHARACTERS} printable characters, "
                f"got {describe(name)}"
            )
        digest = blake2b(name.encode(), digest_size=NUMBER_BYTES, person=b"generation").digest()
        return cls(name, int.from_bytes(digest, "big") if name else 0)

    @classmethod
    def random(cls) -> Generation:
        """Return a generation that nobody shares."""
        return cls.of(secrets.token_hex(RANDOM_BYTES))


class GenerationSource:
    """Where an engine's generation comes from: a name, or a file that is read at each reset.

    Parameters
    ----------
    name : str
        The generation at the start.
    path : str or Path, optional
        A file with the generation on its only line, which a trainer writes before it pushes
        weights; instead of a name.

    Attributes
    ----------
    first : str
        The generation at the start.

    Raises
    ------
    TypeError, ValueError
        If one is wrong, if both are given, or if the file does not name a generation.
    OSError
        If the file cannot be read.
    """

    def __init__(self, name: str = "", path: str | os.PathLike[str] | None = None) -> None:
        self._path = None
        if path is None:
            self.first = Generation.of(name).name
            return
        if not isinstance(path, str | os.PathLike) or not path:  # type: ignore[redundant-expr]
            raise TypeError(f"generation_file must be a path, got {describe(path)}")
        if name:
            raise ValueError(f"generation must not be given with generation_file, got {name!r}")
        self._path = Path(path).absolute()
        try:
            self.first = self._read(self._path)
        except OSError as error:
            rule = f"generation_file must be readable: {error.strerror}"
            raise OSError(error.errno, rule, str(path)) from None

    def _read(self, path: Path) -> str:
        with open(path, "rb", buffering=0, opener=_open) as file:
            data = file.read(MAX_FILE_BYTES + 1) or b""
        name = ""
        with contextlib.suppress(ValueError):  # also of the decoding
            name = Generation.of(data.decode().strip()).name
        if not name:  # empty is a file that is being written: it does not ask for the name ""
            raise ValueError(
                f"generation_file must have one line of 1 to {MAX_CHARACTERS} printable "
                f"characters: {path}"
            )
        return name

    def after_reset(self) -> str:
        """Return the generation after a reset: the file's, otherwise a random one.

        A file that cannot be read counts as none, and a line is logged. So is what it means.
        """
        name = None
        if self._path is not None:
            try:
                name = self._read(self._path)
            except (OSError, ValueError) as error:
                write_line(logging.ERROR, "the generation could not be read: %s", error)
        if name is None:
            name = Generation.random().name
            means = "a random name: nothing is shared with other engines until they have the same"
        else:
            means = "as in its file: blocks are shared with every engine that has the same"
        write_line(logging.WARNING, "tiers have generation %r from now on, %s", name, means)
        return name
