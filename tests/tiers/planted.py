"""What a stranger plants where a tier keeps its files, and what it could lead to."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

LONG_AGO = 1_000_000_000.0
NUMBER = "0123456789abcdef"
"""The number of a generation that is there already."""


class Victim:
    """A tree outside that looks like what a sweep removes."""

    def __init__(self, path: Path, block: str = "a block.kv") -> None:
        self.path = path
        for folder in (path, path / "00", path / NUMBER / "00", path / "ff" / "deep"):
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("precious.kv", "epoch", "sweep.lock", "old.tmp", block):
                (folder / name).write_bytes(b"of someone else")
                os.utime(folder / name, (LONG_AGO, LONG_AGO))
        self.file = path / "precious.kv"
        self.before = everything(path)

    def is_untouched(self) -> bool:
        return everything(self.path) == self.before


def everything(folder: Path) -> dict[str, object]:
    """Return what is in a folder, byte by byte and time by time."""
    found: dict[str, object] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        about = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = about.st_mode, about.st_ino, about.st_mtime_ns, about.st_nlink, data
    return found


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _folder(path: Path) -> None:
    (path / "in").mkdir(parents=True)
    (path / "in" / "it.kv").write_bytes(b"data")


KINDS: dict[str, Callable[[Path, Victim], object]] = {
    "link to a folder": lambda path, victim: path.symlink_to(victim.path),
    "link to a file": lambda path, victim: path.symlink_to(victim.file),
    "link to nothing": lambda path, victim: path.symlink_to(victim.path / "absent"),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: _socket(path),
    "folder": lambda path, _: _folder(path),
    "empty file": lambda path, _: path.touch(),
    "hard link": lambda path, victim: os.link(victim.file, path),
}
"""What may take a place, and how it is put there."""
