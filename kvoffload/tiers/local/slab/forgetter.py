"""The forgetting of a slab: a new epoch in the header of its table, tried until it is there.

The medium may fail or hang, and the process may be killed, at every step. So there is a thread that
is the only one to write headers, and these steps:

1. The marker is made, an empty file. It is one entry of a folder: a file system that is frozen
   completes it when it goes on, even for a process that was killed meanwhile, while a write is
   given up then. Who opens the slab and finds it takes no seal for valid.
2. The header is written, and synced: what was forgotten is gone for good.
3. The marker is removed, if nothing was to be forgotten meanwhile.

Where a step fails, the marker is synced as far as that works, and all are tried again after a
pause. Of several epochs only the newest is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import NamedTuple

from kvoffload.tiers.metrics import write_line

from .folder import OpenFolder
from .layout import FORGETTING, TABLE

__all__ = ["Forgetter"]

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
GRACE_S = 0.1
"""Seconds that a last try has at least."""


class _Header(NamedTuple):
    """A header that is wanted, and its id: one higher each time."""

    header_id: int
    page: bytes


class Forgetter:
    """The one writer of a slab's headers, in a thread of its own while there is something to write.

    It uses the slab's folder, and the table that is open there, and closes neither.
    """

    def __init__(self, folder: OpenFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._news = threading.Condition()
        self._wanted = _Header(0, b"")
        self._written = 0  # the id of the last header that the medium confirmed
        self._marked = False  # the marker may be there
        self._has_failed = False  # a try for the header that is wanted
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def confirmed(self) -> bool:
        """Whether the last header that was asked for is on the medium."""
        return self._written == self._wanted.header_id

    def want(self, page: bytes) -> None:
        """Queue a header to be written."""
        with self._news:
            self._marked = True
            self._has_failed = False
            self._wanted = _Header(self._wanted.header_id + 1, page)
            self._start()
            self._news.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the last header is on the medium before the time is over."""
        with self._news:
            return self._news.wait_for(lambda: self.confirmed, timeout_s)

    def go_on(self) -> None:
        """Start a thread that tries again, where none could be started."""
        if self._marked and not (self._closing or self._runs()):
            with self._news:
                self._start()

    def close(self, until: float) -> bool:
        """Try once more what was not written; return whether by then no call is under way."""
        with self._news:
            self._closing = True
            if self._marked:
                self._start()
            self._news.notify_all()
            thread = self._thread
        if thread is None or not thread.is_alive():
            return True
        thread.join(max(GRACE_S, until - time.monotonic()))
        return not thread.is_alive()

    def _start(self) -> None:
        """Start the thread, if one can be started; the next call tries again."""
        if not self._runs():
            self._thread = threading.Thread(target=self._run, name="kvoffload-forget", daemon=True)
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def _runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            with self._news:
                (header_id, page), last = self._wanted, self._closing
            self._try(header_id, page)
            with self._news:
                if not self._marked or (last and header_id == self._wanted.header_id):
                    self._thread = None
                    return
                if header_id != self._wanted.header_id:
                    pause = FIRST_PAUSE_S
                elif not self._closing:
                    self._news.wait(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)

    def _try(self, header_id: int, page: bytes) -> None:
        """Make the steps for one header, as far as they work."""
        if self._written < header_id and not self._write(page):
            self._has_failed = True
            return
        is_marked = self._wanted.header_id != header_id  # a newer one is made with the same marker
        if not is_marked:
            try:
                self._folder.unlink(FORGETTING)
            except OSError:
                is_marked = True  # a restart would find nothing: tried again
        with self._news:
            if self._has_failed and self._wanted.header_id == header_id > self._written:
                write_line(logging.WARNING, "tier %r has forgotten for good", self._name)
            self._written = header_id
            self._marked = is_marked or self._wanted.header_id != header_id
            self._news.notify_all()

    def _write(self, page: bytes) -> bool:
        with contextlib.suppress(OSError):  # it may be there, or not be possible
            os.close(self._folder.create(FORGETTING))
        try:
            write_header(self._folder, page)
        except OSError:
            with contextlib.suppress(OSError):
                os.fsync(self._folder.fd)
            return False
        return True


def write_header(folder: OpenFolder, page: bytes) -> None:
    """Write the header of a table that is open, and wait until it is on the medium."""
    fd = folder.files[TABLE]
    view = memoryview(page)
    while view:
        view = view[os.pwrite(fd, view, len(page) - len(view)) :]
    os.fsync(fd)
