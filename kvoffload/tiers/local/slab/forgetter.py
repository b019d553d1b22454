"""The forgetting of a slab: a new epoch in the header of its table, retried until it is written.

The medium may fail or hang, and the process may be killed, at every step. So only one thread writes
headers, in these steps:

1. The marker, an empty file, is made. It is a single entry of a folder: a frozen file system
   completes it when it resumes, even for a process that was killed meanwhile, whose writes it
   abandons. A tier that opens the slab and finds the marker treats no seal as valid.
2. The header is written and synced: the forgotten blocks are gone permanently.
3. The marker is removed, unless another `forget` came meanwhile.

If a step fails, the marker is synced if possible, and all steps are retried after a pause. Of
several epochs only the newest is written.
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
"""Least seconds for the last try."""


class _Header(NamedTuple):
    """A header to write, and its id, which rises by one each time."""

    header_id: int
    page: bytes


class Forgetter:
    """The only writer of a slab's headers, with a thread while there is a header to write.

    It uses the slab's folder and the open table in it, and closes neither.
    """

    def __init__(self, folder: OpenFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._news = threading.Condition()
        self._wanted = _Header(0, b"")
        self._written = 0  # the id of the last header that the medium confirmed
        self._marked = False  # the marker may exist
        self._has_failed = False  # a try to write the wanted header has failed
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def confirmed(self) -> bool:
        """Whether the last wanted header is on the medium."""
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
        """Wait until the last header is on the medium; return whether it is."""
        with self._news:
            return self._news.wait_for(lambda: self.confirmed, timeout_s)

    def go_on(self) -> None:
        """Start a thread that retries, if none could be started before."""
        if self._marked and not (self._closing or self._runs()):
            with self._news:
                self._start()

    def close(self, until: float) -> bool:
        """Try once more to write the header; return whether no call is under way at the end."""
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
        """Start the thread if possible; otherwise the next call retries."""
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
        """Do the steps for one header, as far as they succeed."""
        if self._written < header_id and not self._write(page):
            self._has_failed = True
            return
        is_marked = self._wanted.header_id != header_id  # a newer header uses the same marker
        if not is_marked:
            try:
                self._folder.unlink(FORGETTING)
            except OSError:
                is_marked = True  # a restart would find nothing: retried
        with self._news:
            if self._has_failed and self._wanted.header_id == header_id > self._written:
                write_line(logging.WARNING, "tier %r has forgotten permanently", self._name)
            self._written = header_id
            self._marked = is_marked or self._wanted.header_id != header_id
            self._news.notify_all()

    def _write(self, page: bytes) -> bool:
        with contextlib.suppress(OSError):  # it may exist, or not be possible
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
