"""Object stores - S3, Google Cloud Storage, Azure - with obstore: one object per block.

Under the prefix and the namespace's fingerprint are ``namespace.json`` and the blocks,
``<number>/<hh>/<key>``: the number of the generation in 16 hex digits, two hex digits of a sum of
the key, which spread names over the store's partitions, and the stored key in hex. An object is a
block's bytes and its seal.

Structure
    obstore reads the whole body of an error answer, even one that has no end. So it runs in a
    separate process with a limit, which `ObjectsClient` calls. A thread makes the requests of its
    blocks at once, and abandons those that are not answered by the deadline. Blocks are stored only
    if no object has the name (``If-None-Match``). A query for a chain of keys, in the order of the
    chain, asks for `PROBES` of them, evenly spaced, and then for those between the last present and
    the first absent key: two rounds for 4,096 keys.
Invariants
    An object's size is compared before its bytes are read, and no more are read. The client makes
    no retry. Its process copies each block to store, so that an abandoned request cannot send the
    buffer's later contents. Only an answer that the verb expects settles a block: a server may
    answer with any status.
Cost
    A request per block, and one per minute for the namespace; a copy of each block between the
    processes. The bucket's lifecycle rules remove old blocks.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvoffload._extras import require
from kvoffload.errors import describe
from kvoffload.tiers.base import Status, TierError
from kvoffload.tiers.deletion import Deleted
from kvoffload.tiers.engine.contract import MOVING, Block
from kvoffload.tiers.namespace import Namespace, check_namespace
from kvoffload.tiers.options import STAGED, Readers, TierKeywords, TierOptions, flag, read_options
from kvoffload.tiers.region import num_buffers
from kvoffload.tiers.seal import SEAL_BYTES, xxh3_64

from . import _objects_worker as worker
from ._objects_worker import Item
from .objects_client import Answer, ObjectsClient
from .store import RemoteStore, as_settings
from .tier import RemoteTier

if TYPE_CHECKING:
    from typing_extensions import Unpack

SCHEMES = ("s3", "gs", "az")
PROBES = 64
BLOCKS_PER_CALL = 16
REQUEST_S = 30.0
"""Seconds after which the client itself abandons a request; deadlines are shorter."""
CONNECT_S = 5.0
MEMORY_BYTES = 256 * 2**20
"""Bytes that the client's process may allocate besides those of requests."""
PAGE_BYTES = 2**20
"""Most bytes of a list of some objects."""
REQUEST_BYTES = 2 * 2**20
"""Bytes that it may allocate per request, besides twice the block."""


class RequestError(Exception):
    """A failed request: the name of the client's error, and its status."""

    def __init__(self, kind: str, status: Status) -> None:
        super().__init__(kind)
        self.kind = kind
        self.status = status


class ObjectStore(RemoteStore):
    """Blocks as objects, through a client that is closed with the store."""

    blocks_per_call = BLOCKS_PER_CALL
    keys_per_query = PROBES * PROBES

    def __init__(self, namespace: Namespace, client: ObjectsClient) -> None:
        super().__init__(namespace)
        self._client = client
        self._folder = self.fingerprint.hex()

    def _path(self, key: bytes, generation: int) -> str:
        return f"{self._folder}/{generation:016x}/{xxh3_64(key) & 0xFF:02x}/{key.hex()}"

    def start(self) -> None:
        """Start the client, so that the first request need not wait for it."""
        with contextlib.suppress(OSError):
            self._client.start()

    # -- small objects -----------------------------------------------------------------------

    def _ask(self, verb: int, items: Sequence[Item], most: int = 0) -> list[Answer]:
        """Return the answers for small objects, in order; raise the first error."""
        answers: list[Answer] = []
        self._client.ask(verb, items, self.seconds_left(), answers.append, size=(0, most))
        for answer in answers:
            error = _error(answer)
            if error is not None:
                raise error
        return sorted(answers)

    def visit(self) -> None:
        path = f"{self._folder}/namespace.json"
        (found,) = self._ask(worker.GET, [Item(path)], self.json_bytes)
        too_long = found.outcome == worker.OTHER_SIZE
        if not self.is_ours(bytes(self.json_bytes) if too_long else bytes(found.data)):
            ours = self.namespace.json.encode("ascii")
            self._ask(worker.REPLACE, [Item(path, data=ours)])

    # -- blocks ------------------------------------------------------------------------------

    def _each(
        self,
        verb: int,
        run: Sequence[Block],
        generation: int,
        take: Callable[[Block, Answer], None],
        *,
        size: tuple[int, int] = (0, 0),
    ) -> None:
        """Make one request per block; a failed one sets its block's status.

        `take` is called with the other answers.
        """

        def callback(answer: Answer) -> None:
            block, error = run[answer.position], _error(answer)
            if error is None:
                take(block, answer)
            else:
                block.status = self.meaning(error)

        items = [Item(self._path(block.key, generation)) for block in run]
        if verb == worker.CREATE:
            items = [
                item._replace(data=block.views[0]) for item, block in zip(items, run, strict=True)
            ]
        into = [block.views[0] for block in run] if verb == worker.GET else ()
        self._client.ask(verb, items, self.seconds_left(), callback, size=size, into=into)

    def find(self, run: Sequence[Block], generation: int) -> None:
        def take(block: Block, answer: Answer) -> None:
            block.status = Status.MISS if answer.outcome == worker.ABSENT else Status.OK

        def ask(part: Sequence[Block]) -> None:
            for start in range(0, len(part), PROBES):
                self._each(worker.HEAD, part[start : start + PROBES], generation, take)

        count = len(run)
        if count <= PROBES:
            ask(run)
            return
        probed = sorted({index * (count - 1) // (PROBES - 1) for index in range(PROBES)})
        ask([run[index] for index in probed])
        found = [run[index].status for index in probed]
        wrong = [status for status in found if status not in (Status.OK, Status.MISS)]
        if wrong:  # the others are unknown, too: the first error counts for all
            _fill(run, 0, count, Status(wrong[0]))
            return
        absent = next((index for index in probed if run[index].status == Status.MISS), count)
        there = max((index for index in probed if index < absent), default=-1)
        _fill(run, 0, there + 1, Status.OK)
        _fill(run, absent, count, Status.MISS)
        ask(run[there + 1 : absent])

    def fetch(self, run: Sequence[Block], generation: int) -> None:
        def take(block: Block, answer: Answer) -> None:
            if answer.outcome == worker.DONE:
                self.check(block, memoryview(answer.data), generation)
            else:
                absent = answer.outcome == worker.ABSENT
                block.status = Status.MISS if absent else Status.CORRUPT

        size = (self.block_bytes, self.block_bytes)
        self._each(worker.GET, run, generation, take, size=size)

    def store(self, run: Sequence[Block], generation: int) -> None:
        def take(block: Block, _: Answer) -> None:
            block.status = Status.OK

        self._each(worker.CREATE, run, generation, take)

    def drop(self, keys: Sequence[bytes], generation: int) -> None:
        for start in range(0, len(keys), PROBES):
            part = keys[start : start + PROBES]
            self._ask(worker.DELETE, [Item(self._path(key, generation)) for key in part])

    def status_of(self, error: Exception) -> Status:
        if isinstance(error, RequestError):
            return error.status
        if isinstance(error, TimeoutError):
            return Status.TIMEOUT
        return Status.UNAVAILABLE if isinstance(error, OSError) else Status.FAILED

    def name_of(self, error: Exception) -> str:
        return error.kind if isinstance(error, RequestError) else super().name_of(error)

    def close(self) -> None:
        self._client.close()

    def abandon(self) -> None:
        self._client.abandon()


def _error(answer: Answer) -> Exception | None:
    """Return the error of an answer, or None."""
    if answer.outcome == worker.LATE:
        return TimeoutError()
    if answer.outcome == worker.UNREACHED:
        return RequestError(answer.text, Status.UNAVAILABLE)
    return RequestError(answer.text, Status.FAILED) if answer.outcome == worker.FAILED else None


def _fill(run: Sequence[Block], start: int, stop: int, status: Status) -> None:
    """Set the statuses of blocks that were not requested."""
    for index in range(start, stop):
        if run[index].status == MOVING:
            run[index].status = status


class ObjectTier(RemoteTier):
    """A tier of objects in a bucket of S3 or a compatible store, Google Cloud Storage or Azure.

    Parameters
    ----------
    url : str
        ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
    namespace : Namespace
        The namespace of the bytes; its ``block_bytes`` is the size of a block.
    config : mapping, optional
        Settings of obstore's store, such as ``endpoint``, ``region`` and ``access_key_id``. Missing
        ones come from the environment (``AWS_ACCESS_KEY_ID`` and the like).
    client_options : mapping, optional
        Settings of obstore's client, such as ``allow_http``.
    **keywords
        The options of `TierOptions`, whose sizes may be text; by default ``threads=4`` and
        ``name="objects"``. Each thread makes 16 requests at once. This tier is always staged.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message shows no settings.
    ImportError
        If the package ``obstore`` is missing.

    Notes
    -----
    The client, obstore, runs in a separate process, which `attach` starts with this interpreter,
    `sys.executable`, and with the present `sys.path` and environment. On Linux its memory is
    limited to 256 MiB and about twice the bytes in flight. If it ends, requests under way are
    UNAVAILABLE, and it is restarted, at most once per second.

    The store is not called before a region is attached. The tier never evicts: give the bucket a
    lifecycle rule.

    A query of more than 64 keys treats them as a chain: it may assume that keys before a present
    one are present, and keys after an absent one absent. Only loads are certain.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: Namespace,
        config: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[TierKeywords],
    ) -> None:
        address = _public(url)
        config = as_settings("config", config)
        settings = _settings(url, config, as_settings("client_options", client_options))
        options = TierOptions.of(keywords, name="objects", threads=4)
        requests = options.threads * BLOCKS_PER_CALL
        block_bytes = check_namespace(namespace).block_bytes + SEAL_BYTES
        moving = min(requests, num_buffers(options.staging_bytes, block_bytes)) * block_bytes
        memory_bytes = MEMORY_BYTES + 2 * moving + requests * REQUEST_BYTES
        store = ObjectStore(namespace, ObjectsClient(settings, options.threads, memory_bytes))
        store.place = address
        super().__init__(store, options)


def _settings(
    url: str, config: Mapping[str, Any], client_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the client's settings; ValueError, which shows none of them, if they are wrong."""
    # to which the client would send nothing, whatever AWS_ALLOW_HTTP says
    if str(config.get("endpoint")).startswith("http:") and not client_options.get("allow_http"):
        raise ValueError("endpoint must begin with https: unless http is yes, got http:")
    require("obstore", "ObjectTier", "objects")
    import obstore.exceptions
    import obstore.store

    options = {
        "config": dict(config),
        "client_options": {
            "timeout": timedelta(seconds=REQUEST_S),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            **client_options,
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(0)},
    }
    settings = {"url": url, "options": options}
    try:
        from_url: Any = obstore.store.from_url
        from_url(url, **options)
        worker.encode_settings(settings)
    except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
        raise ValueError(
            f"url and settings must be valid for obstore, got {type(error).__name__}"
        ) from None
    return settings


def _public(url: Any) -> str:
    """Return an address without user, password and options; TypeError, ValueError if invalid."""
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


_READERS: Readers = {
    **STAGED,
    "endpoint": ("endpoint", str),
    "region": ("region", str),
    "http": ("allow_http", flag),
}


def _open(scheme: str, place: str, namespace: Namespace, /, **options: str) -> ObjectTier:
    """Open ``s3://bucket/prefix`` and the like; see `kvoffload.tiers.open_tier`."""
    return ObjectTier(f"{scheme}:{place}", namespace=namespace, **_read(options))


def _read(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of a tier, with those of the store and of its client as dicts."""
    arguments = read_options(options, _READERS)
    for keyword, names in (("config", ("endpoint", "region")), ("client_options", ("allow_http",))):
        arguments[keyword] = {name: arguments.pop(name) for name in names if name in arguments}
    return arguments


def delete_blocks(url: str, options: Mapping[str, str], number: int | None) -> Iterator[Deleted]:
    """Delete the blocks of a prefix, those of a generation or all; see ``deletion``."""
    arguments = _read(options)
    address = _public(url)
    settings = _settings(url, arguments["config"], arguments["client_options"])
    digits = "[0-9a-f]"
    generation = f"{digits}{{16}}" if number is None else f"{number:016x}"
    is_block = re.compile(f"{digits}{{32}}/{generation}/{digits}{{2}}/{digits}+").fullmatch
    # Its namespace is not used; its client bounds the answers, and the time of each call.
    store = ObjectStore(Namespace("any", 1), ObjectsClient(settings, 1, MEMORY_BYTES))

    def ask(verb: int, paths: Iterable[str]) -> list[Answer]:
        store.deadline = time.monotonic() + REQUEST_S
        return store._ask(verb, [Item(path) for path in paths], PAGE_BYTES)

    try:
        while page := json.loads(bytes(ask(worker.LIST, [""])[0].data)):
            found = {path: nbytes for path, nbytes in page if is_block(path)}
            ask(worker.DELETE, found)
            yield Deleted(len(found), sum(found.values()))
    except (RequestError, OSError) as error:  # its text may have credentials
        raise TierError(f"{address}: {store.name_of(error)}") from None
    finally:
        store.close()


open_s3 = partial(_open, "s3")
open_gs = partial(_open, "gs")
open_az = partial(_open, "az")
