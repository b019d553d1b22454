"""Object stores - S3, Google Cloud Storage, Azure - by obstore: one object per block.

Below the prefix and the namespace's fingerprint lie ``namespace.json``, ``epoch`` (16 hex digits)
and the blocks: ``<epoch>/<hh>/<key>``, with two hex digits of a sum of the key, which spread names
over the store's partitions, and the stored key in hex. An object is a block's bytes and its seal.

Structure
    A thread makes the requests of its blocks at once, in an event loop of its own, and gives those
    up that have not answered by the deadline. Blocks are stored where there is no object of the
    name (``If-None-Match``). A query of a chain of keys, in the order of the chain, asks for
    `PROBES` of them, evenly spaced, and then for those between the last that is there and the first
    that is not: two rounds for 4,096 keys.
Invariants
    An object's size is compared before its bytes are asked for, and no more are read. The client
    makes no retry. A request holds a copy of its block: one that was given up cannot send what the
    buffer has later.
Cost
    A request per block, and one per minute for the epoch. The bucket's lifecycle rules remove what
    is old, and what was forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvoffload.errors import describe

from ._io_py import Block
from .base import Status
from .epoch import EPOCH_CHARACTERS, epoch_text, parse_epoch
from .namespace import Namespace
from .pool import MOVING
from .pooled import MAX_QUEUED_BYTES
from .remote import RemoteTier
from .remote_pool import RemoteStore
from .seal import xxh3_64
from .staging import STAGING_BYTES

__all__ = ["ObjectTier"]

SCHEMES = ("s3", "gs", "az")
EPOCH_S = 60.0
PROBES = 64
ROUNDS = 8
"""Times that an epoch is given while others keep changing it."""
REQUEST_S = 30.0
"""Seconds after which the client gives a request up by itself; deadlines are shorter."""
CONNECT_S = 5.0

Found = TypeVar("Found")


def _client_package() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ImportError(
            "ObjectTier needs obstore: pip install 'kvoffload[objects]'", name="obstore"
        ) from error
    return obstore


class ObjectStore(RemoteStore):
    """Blocks as objects.

    Parameters
    ----------
    name : str
        The tier's label, for logs.
    namespace : Namespace
        What the bytes mean.
    bucket : object
        A store of obstore.
    """

    blocks_per_call = 16
    keys_per_query = PROBES * PROBES
    epoch_s = EPOCH_S

    def __init__(self, name: str, namespace: Namespace, bucket: Any) -> None:
        super().__init__(name, namespace)
        self._client = _client_package()
        self._bucket = bucket
        self._folder = self.fingerprint.hex()
        self._own = threading.local()
        self._loops: list[asyncio.AbstractEventLoop] = []

    def _path(self, key: bytes, epoch: int) -> str:
        return f"{self._folder}/{epoch:016x}/{xxh3_64(key) & 0xFF:02x}/{key.hex()}"

    def _run(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Run a coroutine in this thread's loop, until the deadline.

        Raises
        ------
        TimeoutError
            If it has not ended by then.
        """
        return self._loop().run_until_complete(asyncio.wait_for(work, self.seconds_left()))

    def _loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop | None = getattr(self._own, "loop", None)
        if loop is None:
            loop = self._own.loop = asyncio.new_event_loop()
            self._loops.append(loop)
        return loop

    def _each(
        self, run: Sequence[Block], request: Callable[[Block], Coroutine[Any, Any, None]]
    ) -> None:
        """Make a request for each block; a block whose request fails gets what that means."""
        if not run:
            return

        async def all_of_them() -> None:
            tasks = [asyncio.ensure_future(request(block)) for block in run]
            try:
                _, late = await asyncio.wait(tasks, timeout=self.seconds_left())
                for task in late:
                    task.cancel()
                if late:
                    await asyncio.wait(late)
            except BaseException:
                for task in tasks:
                    task.cancel()
                raise
            for block, task in zip(run, tasks, strict=True):
                error = TimeoutError() if task.cancelled() else task.exception()
                if isinstance(error, Exception):
                    block.status = self._meaning(error)

        self._loop().run_until_complete(all_of_them())

    async def _get(self, path: str, most: int) -> tuple[bytes | None, dict[str, Any] | None]:
        """Return a small object's bytes, None for a longer one, and its version, None for none."""
        try:
            answer = await self._client.get_async(self._bucket, path)
        except FileNotFoundError:
            return None, None
        version = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta[name]}
        if answer.meta["size"] > most:
            return None, version
        return await _collect(answer, most), version

    async def _create(self, path: str, data: bytes) -> None:
        """Store an object where there is none."""
        with contextlib.suppress(self._client.exceptions.AlreadyExistsError):
            await self._client.put_async(
                self._bucket, path, data, mode="create", use_multipart=False
            )

    # -- epochs ------------------------------------------------------------------------------

    def _ask_epoch(self) -> int | None:
        return self._run(self._ask())

    async def _ask(self) -> int | None:
        path = f"{self._folder}/namespace.json"
        (data, _), (json, _) = await asyncio.gather(
            self._get(f"{self._folder}/epoch", EPOCH_CHARACTERS),
            self._get(path, self._json_bytes),
        )
        if not self._compare(json):
            ours = self.namespace.json.encode("ascii")
            await self._client.put_async(self._bucket, path, ours, use_multipart=False)
        return parse_epoch(data)

    def _raise_epoch(self, epoch: int) -> int:
        return self._run(self._raise(epoch))

    async def _raise(self, epoch: int) -> int:
        """Replace the object on the condition that it is still the one that was read."""
        path, errors = f"{self._folder}/epoch", self._client.exceptions
        for _ in range(ROUNDS):
            data, version = await self._get(path, EPOCH_CHARACTERS)
            found = parse_epoch(data)
            if found is not None and found >= epoch:
                return found
            mode = version or "create"
            with contextlib.suppress(errors.AlreadyExistsError, errors.PreconditionError):
                await self._put_epoch(path, epoch, mode)
        raise TimeoutError

    async def _put_epoch(self, path: str, epoch: int, mode: Any) -> None:
        data = epoch_text(epoch)
        try:
            await self._client.put_async(self._bucket, path, data, mode=mode, use_multipart=False)
        except (self._client.exceptions.NotSupportedError, NotImplementedError):
            # A store without conditions: the last writer wins, and who wrote a higher one repeats.
            await self._client.put_async(self._bucket, path, data, use_multipart=False)

    # -- blocks ------------------------------------------------------------------------------

    def _find(self, run: Sequence[Block], epoch: int) -> None:
        async def ask(block: Block) -> None:
            try:
                await self._client.head_async(self._bucket, self._path(block.key, epoch))
            except FileNotFoundError:
                block.status = Status.MISS
            else:
                block.status = Status.OK

        count = len(run)
        if count <= PROBES:
            self._each(run, ask)
            return
        probed = sorted({place * (count - 1) // (PROBES - 1) for place in range(PROBES)})
        self._each([run[place] for place in probed], ask)
        if any(run[place].status not in (Status.OK, Status.MISS) for place in probed):
            # Nothing is known of the others either: the first trouble stands for all.
            trouble = next(run[p].status for p in probed if run[p].status > Status.MISS)
            _fill(run, 0, count, Status(trouble))
            return
        absent = next((place for place in probed if run[place].status == Status.MISS), count)
        there = max((place for place in probed if place < absent), default=-1)
        self._each(run[there + 1 : absent], ask)
        _fill(run, 0, there + 1, Status.OK)
        _fill(run, absent, count, Status.MISS)

    def _fetch(self, run: Sequence[Block], epoch: int) -> None:
        async def fetch(block: Block) -> None:
            try:
                answer = await self._client.get_async(self._bucket, self._path(block.key, epoch))
            except FileNotFoundError:
                block.status = Status.MISS
                return
            if answer.meta["size"] != self.block_bytes:
                block.status = Status.CORRUPT
                return
            self._check(block, memoryview(await _collect(answer, self.block_bytes)), epoch)

        self._each(run, fetch)

    def _store(self, run: Sequence[Block], epoch: int) -> None:
        async def store(block: Block) -> None:
            await self._create(self._path(block.key, epoch), bytes(block.views[0]))
            block.status = Status.OK

        self._each(run, store)

    def _drop(self, keys: Sequence[bytes], epoch: int) -> None:
        async def drop(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await self._client.delete_async(self._bucket, path)

        async def drop_all() -> None:
            for start in range(0, len(keys), PROBES):
                part = keys[start : start + PROBES]
                await _together([drop(self._path(key, epoch)) for key in part])

        self._run(drop_all())

    def _status_of(self, error: Exception) -> Status:
        if isinstance(error, asyncio.TimeoutError | TimeoutError):
            return Status.TIMEOUT
        # Not reached, refused, wrong credentials, no such bucket, an error of the server.
        known = isinstance(error, self._client.exceptions.BaseError | OSError)
        return Status.UNAVAILABLE if known else Status.FAILED

    def close(self) -> None:
        """Close the loops, whose threads have ended."""
        for loop in self._loops:
            loop.close()


async def _together(work: Sequence[Awaitable[None]]) -> None:
    await asyncio.gather(*work)


async def _collect(answer: Any, most: int) -> bytes:
    """Return the bytes of an answer, no more than so many and one piece of the network's."""
    pieces, size = [], 0
    async for piece in answer.stream(min_chunk_size=most):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            break
    return bytes(pieces[0]) if len(pieces) == 1 else b"".join(map(bytes, pieces))


def _fill(run: Sequence[Block], start: int, stop: int, status: Status) -> None:
    """Set the statuses of blocks that were not asked for."""
    for place in range(start, stop):
        if run[place].status == MOVING:
            run[place].status = status


class ObjectTier(RemoteTier):
    """A tier of objects in a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure.

    Parameters
    ----------
    url : str
        ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
    threads : int
        Number of threads; each makes 16 requests at once.
    namespace : Namespace
        What the bytes mean; its ``block_bytes`` is the size of a block.
    config : mapping, optional
        Settings of obstore's store, such as ``endpoint``, ``region`` and ``access_key_id``. What is
        not given comes from the environment (``AWS_ACCESS_KEY_ID`` and the like).
    client_options : mapping, optional
        Settings of obstore's client, such as ``allow_http``.
    staging_bytes, ack, name, enable_events, max_queued_bytes
        As of `FileTier`; this tier is always staged.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message shows no settings.
    ImportError
        If the package ``obstore`` is missing.

    Notes
    -----
    The client has threads that a forked child has not: in a child of a process that used one, make
    no tier of this kind; start such processes afresh.

    Nothing is asked of the store before a region is attached. Nothing is ever evicted by the tier:
    give the bucket a lifecycle rule.

    A query of more than 64 keys takes them for a chain and may presume: keys before one that is
    there are there, keys after one that is not are not. Loads decide. `forget` holds for all tiers
    of the namespace, for those of other processes within a minute.
    """

    def __init__(
        self,
        url: str,
        threads: int = 4,
        *,
        namespace: Namespace,
        config: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        staging_bytes: int = STAGING_BYTES,
        ack: str = "copied",
        name: str = "objects",
        enable_events: bool = False,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._place = _public(url)
        self._bucket: Any = _open_bucket(url, config or {}, client_options or {})
        super().__init__(
            namespace,
            None,
            threads=threads,
            staging_bytes=staging_bytes,
            ack=ack,
            name=name,
            enable_events=enable_events,
            max_queued_bytes=max_queued_bytes,
        )
        del self._bucket  # the store has it
        self._open()

    def _make_store(self) -> ObjectStore:
        return ObjectStore(self.name, self.namespace, self._bucket)

    @property
    def place(self) -> str:
        """The bucket and the prefix."""
        return self._place


def _open_bucket(url: str, config: Mapping[str, Any], client_options: Mapping[str, Any]) -> Any:
    """Return obstore's store.

    Raises
    ------
    ValueError
        If it does not take the settings; the message does not show them.
    """
    client = _client_package()
    options = {
        "timeout": timedelta(seconds=REQUEST_S),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        **client_options,
    }
    retry = {"max_retries": 0, "retry_timeout": timedelta(0)}
    try:
        return client.store.from_url(
            url, config=dict(config), client_options=options, retry_config=retry
        )
    except (client.exceptions.BaseError, ValueError, TypeError) as error:
        raise ValueError(
            f"url and settings must be such as obstore takes, got {type(error).__name__}"
        ) from None


def _public(url: Any) -> str:
    """Return an address without user, password and options.

    Raises
    ------
    TypeError, ValueError
        If it is none.
    """
    if not isinstance(url, str):
        raise TypeError(f"url must be text, got {type(url).__name__}")
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(
            f"url must begin with {', '.join(SCHEMES)} and ://, and name a bucket, "
            f"got scheme {describe(parts.scheme)}"
        )
    if "@" in parts.netloc or parts.query:
        raise ValueError("url must hold no credentials and no options: give them as config")
    return f"{parts.scheme}://{parts.netloc}{parts.path}"
