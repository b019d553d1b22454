"""A folder for the files of one run: in memory, where the system has a folder there."""

from __future__ import annotations

import os
import tempfile

IN_MEMORY = "/dev/shm"


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder, a context manager that removes it."""
    usable = os.access(IN_MEMORY, os.W_OK | os.X_OK)
    return tempfile.TemporaryDirectory(prefix="kvoffload-", dir=IN_MEMORY if usable else None)
