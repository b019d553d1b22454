"""A client of object stores in a separate process.

Structure
    `ObjectsClient` starts a process (`_objects_worker`) when it needs one. A calling thread has one
    of its connections during a request: it sends a request for some objects and gets an answer per
    object.
Invariants
    The request bounds the answers: this process grows only by the data of a small object. A block
    is received in the buffer of its request. A connection is reused if a request was answered
    completely. Otherwise the process is ended: one that does not answer within `GRACE_S` after the
    deadline hangs. At most one process is started per `RESTART_S`, however often it ends.
Cost
    Two copies per block, into a socket and out of it, each in one system call without the
    interpreter's lock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.tiers.folder import above_streams

from . import _objects_worker as worker

GRACE_S = 2.0
"""Seconds after a request's deadline for the process to report it."""
START_S = 30.0
"""Seconds for the process to start."""
RESTART_S = 1.0
"""Minimum seconds between two starts."""
REAP_S = 5.0
"""Seconds for a killed process to end."""
SOCKET_BYTES = 2**22
"""Bytes that a connection may buffer, if the system allows it."""

_SEND = getattr(socket, "MSG_NOSIGNAL", 0)  # no SIGPIPE, however the engine handles it
_TIME = struct.Struct("@ll")


class ObjectsClientError(ConnectionError):
    """An error: the process of the client has ended or could not be started."""


class Answer(NamedTuple):
    """The answer to a request for one object."""

    position: int  # of the object in the request
    outcome: int  # `DONE`, `ABSENT`, `EXISTS`, `OTHER_SIZE`, `LATE`, `UNREACHED` or `FAILED`
    text: str = ""  # the name of an error's type
    data: worker.Data = b""  # the bytes that were read


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets with descriptors above the standard streams."""
    one, other = socket.socketpair()
    with one, other:
        return (
            socket.socket(fileno=above_streams(one.detach())),
            socket.socket(fileno=above_streams(other.detach())),
        )


class _Process:
    """One process and the connections to it."""

    def __init__(self, settings: bytes, count: int) -> None:
        self.started = time.monotonic()
        self.ended = False
        pairs = [_socket_pair() for _ in range(count + 1)]
        self._sockets = [ours for ours, _ in pairs]
        self._free = self._sockets[1:]
        self._greeted: set[socket.socket] = set()  # each is added by the thread that has it
        self._changed = threading.Condition()
        try:
            for both in pairs:
                for end in both:
                    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                        with contextlib.suppress(OSError):  # the default does, too
                            end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
            theirs = [theirs.fileno() for _, theirs in pairs]
            self._popen = subprocess.Popen(  # noqa: S603 # this interpreter and our file
                [
                    *(sys.executable, "-I", "-S", worker.__file__, str(theirs[0])),
                    *(str(os.getpid()), ",".join(map(str, theirs[1:]))),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=theirs,
                start_new_session=True,  # Ctrl-C is for the engine only
            )
        except BaseException:
            for ours in self._sockets:
                ours.close()
            raise
        finally:
            for _, end in pairs:
                end.close()
        try:
            self._sockets[0].sendall(worker.LENGTH.pack(len(settings)) + settings, _SEND)
        except OSError:
            self.end()

    @property
    def alive(self) -> bool:
        return not self.ended and self._popen.poll() is None

    def take(self, until: float) -> socket.socket:
        """Take a connection; `give_back` it, or `end` the process.

        Raises TimeoutError if none is free in time, ObjectsClientError if the process has ended.
        """
        with self._changed:
            while not self._free:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if self.ended:
                    raise ObjectsClientError
                self._changed.wait(left)
            connection = self._free.pop()
        if connection not in self._greeted:
            self._meet(connection, until)
        return connection

    def _meet(self, connection: socket.socket, until: float) -> None:
        """Wait for the greeting of a process that starts."""
        _set_timeout(connection, until)
        try:
            if worker.receive(connection, worker.GREETING.size) != worker.GREETING.pack(0):
                raise EOFError  # the text that follows says why there is no client
        except BaseException as error:  # noqa: BLE001 # it is raised
            if isinstance(error, BlockingIOError) and time.monotonic() - self.started <= START_S:
                self.give_back(connection)
                raise TimeoutError from None
            raise self.failed(connection, error) from None
        self._greeted.add(connection)

    def give_back(self, connection: socket.socket) -> None:
        """Return a connection for others to use."""
        with self._changed:
            if self.ended:
                connection.close()
            else:
                self._free.append(connection)
                self._changed.notify()

    def end(self) -> None:
        """Kill the process and wait until it has ended."""
        with self._changed:
            if self.ended:
                return
            self.ended = True
            self._changed.notify_all()
            self._popen.kill()
            for ours in self._sockets:
                with contextlib.suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)  # ends the waits for answers
            self._sockets[0].close()
            for ours in self._free:
                ours.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(REAP_S)

    def failed(self, connection: socket.socket, error: BaseException) -> BaseException:
        """End the process, close a connection that was taken, and return the error to raise.

        Only the thread that took it may: the next file gets the number of a closed descriptor.
        """
        self.end()
        with self._changed:
            connection.close()
        if isinstance(error, BlockingIOError):
            return TimeoutError()
        return ObjectsClientError() if isinstance(error, OSError | EOFError) else error

    def abandon(self) -> None:
        """Release the sockets in a forked child; the process is the parent's."""
        for ours in self._sockets:
            ours.close()
        self._popen.returncode = 0  # else it would be waited for
        self.ended = True


class ObjectsClient:
    """A client of an object store, in a process that is started when it is needed.

    Parameters
    ----------
    settings : mapping
        ``url``, and ``options``, the further arguments of obstore's ``from_url``.
    connections : int
        Number of threads with requests at once.
    memory_bytes : int
        Bytes that the process may allocate for transfers.

    Notes
    -----
    Thread-safety: any number of threads may call `ask`, one thread the other methods.
    """

    def __init__(self, settings: Mapping[str, Any], connections: int, memory_bytes: int) -> None:
        self._settings = worker.encode_settings(
            {
                **settings,
                "path": [entry for entry in sys.path if Path(entry).is_absolute()],
                "memory_bytes": memory_bytes,
            }
        )
        self._connections = connections
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._closed = False

    def start(self) -> _Process:
        """Start the process if it does not run, and return it; or raise ObjectsClientError."""
        with self._lock:
            process = self._process
            if process is not None and process.alive:
                return process
            if self._closed:
                raise ObjectsClientError
            if process is not None:
                process.end()
                if time.monotonic() - process.started < RESTART_S:
                    raise ObjectsClientError
            try:
                self._process = _Process(self._settings, self._connections)
            except OSError as error:
                raise ObjectsClientError from error
            return self._process

    def ask(
        self,
        verb: int,
        items: Sequence[worker.Item],
        seconds: float,
        callback: Callable[[Answer], None],
        *,
        size: tuple[int, int] = (0, 0),
        into: Sequence[memoryview] = (),
    ) -> None:
        """Request several objects at once.

        Parameters
        ----------
        verb : int
            `HEAD`, `GET`, `CREATE`, `REPLACE` or `DELETE`.
        items : sequence of Item
            The objects.
        seconds : float
            Seconds after which unanswered requests are abandoned.
        callback : callable
            Called with each answer, in any order.
        size : tuple of int
            Least and most bytes of an object to read.
        into : sequence of memoryview
            Memory for each object's bytes; by default they are copied to new memory.

        Raises
        ------
        TimeoutError
            If the process did not accept or answer the request in time.
        ObjectsClientError
            If the process ended meanwhile, or cannot be started.
        """
        until = time.monotonic() + seconds
        process = self.start()
        connection = process.take(until)
        try:
            _set_timeout(connection, until + GRACE_S)
            _send(connection, verb, items, max(0.0, until - time.monotonic()), size)
            for _ in items:
                callback(_receive(connection, len(items), size[1], into))
        except BaseException as error:  # noqa: BLE001 # it is raised
            raise process.failed(connection, error) from None
        process.give_back(connection)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.end()

    def abandon(self) -> None:
        """Release everything in a forked child, without waiting for any thread."""
        self._closed = True
        if self._process is not None:
            self._process.abandon()


def _send(
    connection: socket.socket,
    verb: int,
    items: Sequence[worker.Item],
    seconds: float,
    size: tuple[int, int],
) -> None:
    """Send a request, on a connection that only this thread uses."""
    head = worker.REQUEST.pack(verb, seconds, *size, len(items))
    for path, data in items:
        encoded = path.encode()
        head += worker.ITEM.pack(len(encoded), len(data)) + encoded
        if len(data):
            connection.sendall(head, _SEND)
            connection.sendall(data, _SEND)
            head = b""
    connection.sendall(head, _SEND)


def _receive(
    connection: socket.socket, count: int, most: int, into: Sequence[memoryview]
) -> Answer:
    """Receive an answer to a request for `count` objects of at most `most` bytes."""
    head = worker.receive(connection, worker.ANSWER.size)
    index, outcome, text_bytes, nbytes = worker.ANSWER.unpack(head)
    if text_bytes > worker.MAX_TEXT_BYTES or nbytes > most or index >= count:
        raise EOFError  # the process is no longer this client's
    text = worker.receive(connection, text_bytes).decode()
    if not into or not nbytes:
        return Answer(index, outcome, text, worker.receive(connection, nbytes))
    data = into[index][:nbytes]
    worker.fill(connection, data)
    return Answer(index, outcome, text, data)


def _set_timeout(connection: socket.socket, until: float) -> None:
    """Let system calls wait until then, since the interpreter would wait separately per piece."""
    microseconds = max(1, round((until - time.monotonic()) * 1e6))
    value = _TIME.pack(*divmod(microseconds, 10**6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
