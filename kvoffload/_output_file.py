"""A file whose errors name it, for the outputs and the standard streams of commands."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class OutputFile(io.FileIO):
    """A file, open for writing, whose errors name it as `shown`.

    After an error, or when `dropping` is set, further data is dropped, so that a buffer that still
    holds data can be closed without another error.
    """

    def __init__(self, descriptor: int, shown: str, *, closefd: bool = True) -> None:
        super().__init__(descriptor, "wb", closefd=closefd)
        self.shown = shown
        self.dropping = False

    def write(self, data: Buffer, /) -> int:
        """Write as much as the system takes at once; return the number of bytes."""
        if self.dropping:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.dropping = True
            error.filename = self.shown
            raise
