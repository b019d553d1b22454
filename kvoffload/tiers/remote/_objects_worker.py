"""The process that calls an object store, so that no server's answer harms the engine's process.

obstore reads the whole body of an error answer, even one that has no end, and no option limits
that. So obstore runs in this process, whose memory is limited.

Structure
    `objects_client` runs this file by its path, with sockets for a control and some connections. A
    thread with its own event loop serves each connection. A connection begins with a greeting,
    followed by requests and their answers, in any order.
Invariants
    The process takes no more memory than was granted (Linux). It ends if the other side of the
    control is closed, its parent ends, or one of its threads fails. This file imports nothing of
    this package, so that a start costs only the interpreter and obstore.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

GREETING = struct.Struct("<H")
"""Bytes of the text that follows: none, or why there is no client."""
REQUEST = struct.Struct("<BdQQI")
"""Verb, seconds, least and most bytes of an object to read, number of objects."""
ITEM = struct.Struct("<HQ")
"""Bytes of the path and of the data, which follow."""
ANSWER = struct.Struct("<IBHQ")
"""Index of the object in the request, outcome, bytes of the text and of the data, which follow."""
LENGTH = struct.Struct("<Q")
"""Bytes of the settings, which follow on the control."""

HEAD, GET, CREATE, REPLACE, DELETE, LIST = range(6)
"""Verbs. `CREATE` stores only if there is no object, `REPLACE` always. `LIST`, of one item whose
path does not count, reads the next objects of all: their paths and sizes as JSON."""
DONE, ABSENT, EXISTS, OTHER_SIZE, LATE, UNREACHED, FAILED = range(7)
"""Outcomes. The text of the last two is the name of the error's type; others have none."""

PARENT_S = 1.0
"""Seconds between two checks that the parent is alive."""
MAX_TEXT_BYTES = 4096
STACK_BYTES = 2**20


Data: TypeAlias = "bytes | bytearray | memoryview"
Outcome: TypeAlias = "tuple[int, bytes, Data]"
"""An outcome, its text, and the bytes that were read."""


class Item(NamedTuple):
    """An object of a request: its path, and the bytes to store."""

    path: str
    data: Data = b""


def encode_settings(settings: dict[str, Any]) -> bytes:
    """Return settings as JSON; TypeError, which shows no value, if one cannot be encoded."""

    def plain(value: Any) -> dict[str, Any]:
        if isinstance(value, timedelta):
            return {"\0seconds": value.total_seconds()}
        if isinstance(value, bytes):
            return {"\0bytes": base64.b64encode(value).decode("ascii")}
        raise TypeError(f"settings must be text, numbers, bytes or times, got {type(value)}")

    return json.dumps(settings, default=plain).encode("ascii")


def decode_settings(data: bytes | bytearray) -> dict[str, Any]:
    """Return the settings from `encode_settings`."""

    def value(found: dict[str, Any]) -> Any:
        if "\0seconds" in found:
            return timedelta(seconds=found["\0seconds"])
        if "\0bytes" in found:
            return base64.b64decode(found["\0bytes"])
        return found

    settings: dict[str, Any] = json.loads(data, object_hook=value)
    return settings


def fill(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer; EOFError if the other side closed the connection before."""
    while buffer:  # a signal interrupts the call
        got = connection.recv_into(buffer, 0, socket.MSG_WAITALL)
        if not got:
            raise EOFError
        buffer = buffer[got:]


def receive(connection: socket.socket, nbytes: int) -> bytearray:
    """Return `nbytes` bytes; EOFError as `fill`."""
    data = bytearray(nbytes)
    fill(connection, memoryview(data))
    return data


class _Worker:
    """A server of connections that uses one store of obstore."""

    def __init__(self, client: Any, bucket: Any) -> None:
        self._client = client
        self._bucket = bucket
        self._pages = client.list(bucket)

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the connection is closed."""
        loop = asyncio.new_event_loop()
        connection.sendall(GREETING.pack(0))
        while True:
            verb, seconds, least, most, count = REQUEST.unpack(receive(connection, REQUEST.size))
            items = []
            for _ in range(count):
                path, nbytes = ITEM.unpack(receive(connection, ITEM.size))
                items.append(Item(receive(connection, path).decode(), receive(connection, nbytes)))
            work = self._ask_all(connection, verb, seconds, (least, most), items)
            del items
            loop.run_until_complete(work)

    async def _ask_all(
        self,
        connection: socket.socket,
        verb: int,
        seconds: float,
        size: tuple[int, int],
        items: Sequence[Item],
    ) -> None:
        """Request all objects at once; answer each when it arrives or its time is over."""
        tasks = {
            asyncio.ensure_future(self._outcome(verb, item, size)): index
            for index, item in enumerate(items)
        }
        del items
        waiting = set(tasks)
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=max(0.0, until - loop.time()), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            for task in done:
                _answer(connection, tasks.pop(task), *task.result())
        for task in waiting:
            task.cancel()
            _answer(connection, tasks.pop(task), LATE)
        if waiting:
            await asyncio.wait(waiting)

    async def _outcome(self, verb: int, item: Item, size: tuple[int, int]) -> Outcome:
        """Return the outcome, its text and the bytes."""
        errors = self._client.exceptions
        try:
            return await self._ask(verb, item, size)
        except (errors.BaseError, OSError) as error:
            # Only answers that the verb expects are outcomes: a server may answer with any status.
            if isinstance(error, FileNotFoundError) and verb in (HEAD, GET, DELETE):
                return ABSENT, b"", b""
            other = isinstance(error, errors.AlreadyExistsError | errors.PreconditionError)
            if other and verb == CREATE:
                return EXISTS, b"", b""
            # Not reached, refused, wrong credentials, no such bucket, an error of the server.
            return UNREACHED, type(error).__name__.encode(), b""
        except Exception as error:  # noqa: BLE001 # the other answers are valid
            return FAILED, type(error).__name__.encode(), b""

    async def _ask(self, verb: int, item: Item, size: tuple[int, int]) -> Outcome:
        client, bucket = self._client, self._bucket
        if verb == HEAD:
            await client.head_async(bucket, item.path)
        elif verb == GET:
            found = await client.get_async(bucket, item.path)
            if not size[0] <= found.meta["size"] <= size[1]:
                return OTHER_SIZE, b"", b""
            return DONE, b"", memoryview(await found.bytes_async())
        elif verb == DELETE:
            await client.delete_async(bucket, item.path)
        elif verb == LIST:
            async for page in self._pages:
                found = [(one["path"], one["size"]) for one in page]
                return DONE, b"", json.dumps(found).encode("ascii")
            return DONE, b"", b"[]"
        else:
            mode = "create" if verb == CREATE else "overwrite"
            await client.put_async(bucket, item.path, item.data, mode=mode, use_multipart=False)
        return DONE, b"", b""


def _answer(
    connection: socket.socket, index: int, outcome: int, text: bytes = b"", data: Data = b""
) -> None:
    connection.sendall(ANSWER.pack(index, outcome, len(text), len(data)) + text)
    if len(data):
        connection.sendall(data)


# -- the process ---------------------------------------------------------------------------------


def _take_no_more_than(nbytes: int) -> None:
    """Limit the growth of the process to `nbytes` bytes; beyond that, it ends."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        held = int(status.partition("VmData:")[2].split()[0]) * 1024
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = held + nbytes if most == resource.RLIM_INFINITY else min(held + nbytes, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _open(settings: dict[str, Any]) -> _Worker:
    """Make the client, ready to send requests."""
    import obstore
    import obstore.exceptions
    import obstore.store

    bucket = obstore.store.from_url(settings["url"], **settings["options"])

    async def start() -> None:  # the client's threads, before the limit is set
        await obstore.put_async(obstore.store.MemoryStore(), "start", b"")

    asyncio.run(start())
    return _Worker(obstore, bucket)


def _in_thread(work: Callable[[socket.socket], None], connection: socket.socket) -> None:
    def run() -> None:
        try:
            work(connection)
        except BaseException:  # noqa: BLE001
            os._exit(1)  # ending only this thread could leave the process hanging

    threading.Thread(target=run, daemon=True).start()


def main(control_fd: int, connection_fds: Sequence[int], parent: int) -> None:
    """Serve until the parent closes the control."""
    control = socket.socket(fileno=control_fd)
    connections = [socket.socket(fileno=fd) for fd in connection_fds]
    (nbytes,) = LENGTH.unpack(receive(control, LENGTH.size))
    settings = decode_settings(receive(control, nbytes))
    sys.path[:] = settings["path"]
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(min(8, os.cpu_count() or 1)))
    try:
        worker = _open(settings)
    except Exception as error:  # noqa: BLE001
        name = type(error).__name__.encode()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(GREETING.pack(len(name)) + name)
        return
    _take_no_more_than(settings["memory_bytes"])
    threading.stack_size(STACK_BYTES)
    for connection in connections:
        _in_thread(worker.serve, connection)
    while os.getppid() == parent:
        # Forked children of the parent may also hold the other side.
        if select.select([control], [], [], PARENT_S)[0]:
            return


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), [int(text) for text in sys.argv[3].split(",")], int(sys.argv[2]))
    finally:
        os._exit(0)
