"""Mooncake's store: blocks in the memory of other machines, over RDMA or TCP.

Under a prefix and the namespace's fingerprint are ``…/namespace``, ``…/epoch`` (16 hex digits) and
``…/<epoch>/<stored key in hex>``: a block's bytes and its seal.

Structure
    The tier's buffers are registered with the store's client, which reads and writes them itself.
    The first call, in a thread of the tier, sets the client up.
Invariants
    The client's calls have no deadline: a hanging one ends after 30 s. Until then it holds its
    thread and its buffers, never the region's memory; the job has already ended. The client's
    `setup` holds the interpreter's lock for 90 s if no master answers, so it is called only when
    the master accepts connections and its metadata server answers a request.
Cost
    A put and a get copy a block once, between the region and a buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from kvoffload._sizes import check_size, parse_size
from kvoffload.errors import describe
from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.contract import Block
from kvoffload.tiers.epoch import EPOCH_CHARACTERS, epoch_text, parse_epoch
from kvoffload.tiers.namespace import Namespace
from kvoffload.tiers.options import (
    MAX_QUEUED_BYTES,
    STAGED,
    STAGING_BYTES,
    Readers,
    TierOptions,
    read_options,
)
from kvoffload.tiers.region import Region

from .store import RemoteStore
from .tier import RemoteTier

__all__ = ["MooncakeTier"]

EPOCH_S = 10.0
CLOSE_S = 1.0
LOCAL_BUFFER_BYTES = 16 * 2**20
# The client's codes: a negative number instead of a size.
_STATUS_OF = {
    -200: Status.FULL,  # no handle: no segment has room
    -600: Status.CORRUPT,  # the object is longer than the buffer
    -704: Status.MISS,
    -800: Status.UNAVAILABLE,  # a transfer failed
    -900: Status.UNAVAILABLE,  # a call of the master failed
    -901: Status.UNAVAILABLE,  # the master did not answer
}


class StoreError(Exception):
    """A code, < 0, that the client returned."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


def _client_package() -> Any:
    try:
        from mooncake import store
    except ImportError as error:
        raise ImportError(
            "MooncakeTier needs a wheel of Mooncake, such as "
            "mooncake-transfer-engine-non-cuda, and the libraries that it names",
            name="mooncake",
        ) from error
    return store


class MooncakeStore(RemoteStore):
    """Blocks as objects of Mooncake's store; `settings` are those of its client's ``setup``."""

    epoch_s = EPOCH_S

    def __init__(self, namespace: Namespace, settings: Mapping[str, Any], prefix: str) -> None:
        super().__init__(namespace)
        self._package = _client_package()
        self._settings = dict(settings)
        self._folder = f"{prefix}/{self.fingerprint.hex()}"
        self._memory: Region | None = None
        self._client: Any = None

    def use(self, memory: Region) -> None:
        self._memory = memory

    def _name(self, key: bytes, epoch: int) -> str:
        return f"{self._folder}/{epoch:016x}/{key.hex()}"

    def _address(self, block: Block) -> int:
        memory = self._memory
        if memory is None:
            raise RuntimeError("the buffers must be known")
        return memory.address + block.buffer * memory.block_bytes

    def _ready(self) -> Any:
        """Return the client, set up."""
        if self._client is not None:
            return self._client
        self._knock()
        client = self._package.MooncakeDistributedStore()
        _CLIENTS.add(client)
        code = client.setup(*self._settings.values())
        if code:
            raise StoreError(-900)
        memory = self._memory
        if memory is not None:
            code = client.register_buffer(memory.address, memory.nbytes)
            if code:
                raise StoreError(code)
        self._client = client
        return client

    def _knock(self) -> None:
        """Check that the master and its metadata server answer; OSError if not."""
        host, _, port = str(self._settings["master"]).rpartition(":")
        socket.create_connection((host, int(port)), self.seconds_left()).close()
        metadata = str(self._settings["metadata"])
        if metadata.startswith(("http://", "https://")):
            with contextlib.suppress(HTTPError):  # any answer will do
                urlopen(f"{metadata}?key=kvoffload", timeout=self.seconds_left()).close()  # noqa: S310

    # -- epochs ------------------------------------------------------------------------------

    def _get(self, name: str, most: int) -> bytes | None:
        """Return a small object's bytes; None if it is missing or longer than `most`."""
        client = self._ready()
        size = client.get_size(name)
        if size < 0 and size != -704:
            raise StoreError(size)
        return bytes(client.get(name)) if 0 < size <= most else None

    def ask_epoch(self) -> int | None:
        json = self._get(f"{self._folder}/namespace", self.json_bytes)
        if not self.is_ours(json):
            self._replace(f"{self._folder}/namespace", self.namespace.json.encode("ascii"))
        return parse_epoch(self._get(f"{self._folder}/epoch", EPOCH_CHARACTERS))

    def raise_epoch(self, epoch: int, above: int) -> int | None:
        # The client's only condition is "unless there is one". Between the read and the change
        # another process may have written a higher epoch: it finds a lower one at its next read,
        # and writes a new one.
        name = f"{self._folder}/epoch"
        found = parse_epoch(self._get(name, EPOCH_CHARACTERS))
        if found is None or found <= above:
            self._replace(name, epoch_text(epoch))
            found = parse_epoch(self._get(name, EPOCH_CHARACTERS))
        return found

    def delete_epoch(self) -> bool:
        self._remove(f"{self._folder}/epoch")
        return True

    def _remove(self, name: str) -> None:
        """Remove an object even if it is leased; ignore a missing one."""
        code = self._ready().remove(name, True)
        if code < 0 and code != -704:
            raise StoreError(code)

    def _replace(self, name: str, data: bytes) -> None:
        """Store an object, replacing another with its name."""
        code = self._ready().upsert(name, data)
        if code < 0:
            raise StoreError(code)

    # -- blocks ------------------------------------------------------------------------------

    def find(self, run: Sequence[Block], epoch: int) -> None:
        codes = self._ready().batch_is_exist([self._name(block.key, epoch) for block in run])
        for block, code in zip(run, codes, strict=True):
            if code < 0:
                block.status = self.meaning(StoreError(code))
            else:
                block.status = Status.OK if code else Status.MISS

    def fetch(self, run: Sequence[Block], epoch: int) -> None:
        first = {block.key: block for block in run}
        again = [block for block in run if first[block.key] is not block]
        if again:  # of a repeated key, the client fills one buffer
            self.fetch(again, epoch)
            run = list(first.values())
        codes = self._ready().batch_get_into_multi_buffers(*self._arguments(run, epoch))
        for block, code in zip(run, codes, strict=True):
            if code < 0:
                block.status = self.meaning(StoreError(code))
            elif code != self.block_bytes:
                block.status = Status.CORRUPT
            else:
                self.check(block, block.views[0], epoch)

    def store(self, run: Sequence[Block], epoch: int) -> None:
        codes = self._ready().batch_put_from_multi_buffers(*self._arguments(run, epoch))
        for block, code in zip(run, codes, strict=True):
            block.status = self.meaning(StoreError(code)) if code < 0 else Status.OK

    def _arguments(
        self, run: Sequence[Block], epoch: int
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        return (
            [self._name(block.key, epoch) for block in run],
            [[self._address(block)] for block in run],
            [[self.block_bytes]] * len(run),
        )

    def drop(self, keys: Sequence[bytes], epoch: int) -> None:
        for key in keys:
            self._remove(self._name(key, epoch))

    def meaning(self, error: Exception) -> Status:
        if isinstance(error, StoreError) and error.code in (-704, -600):
            return _STATUS_OF[error.code]  # nothing to log
        return super().meaning(error)

    def status_of(self, error: Exception) -> Status:
        if isinstance(error, StoreError):
            return _STATUS_OF.get(error.code, Status.FAILED)
        if isinstance(error, OSError):
            is_late = isinstance(error, TimeoutError) or time.monotonic() >= self.deadline
            return Status.TIMEOUT if is_late else Status.UNAVAILABLE
        return Status.FAILED

    def close(self) -> None:
        """Close the client, which may take long if its master is gone."""
        client, self._client = self._client, None
        memory, self._memory = self._memory, None

        def end() -> None:
            client.close()
            del keep[:]

        if client is not None:
            keep = [memory]  # while the client may know its address
            thread = threading.Thread(target=end, daemon=True)
            thread.start()
            thread.join(CLOSE_S)


class MooncakeTier(RemoteTier):
    """A tier on Mooncake's store.

    Parameters
    ----------
    master : str
        ``host:port`` of the master.
    metadata : str
        Address of the metadata server, such as ``http://host:8080/metadata``.
    threads : int
        Number of threads.
    namespace : Namespace
        The namespace of the bytes; its ``block_bytes`` is the size of a block.
    hostname : str
        Name or address of this machine for others.
    protocol : str
        ``"tcp"`` or ``"rdma"``.
    devices : str
        RDMA devices, separated by commas.
    segment_bytes : int or str
        Memory of this process that the store may use for all clients' objects; 0: none.
    prefix : str
        Prefix of all names.
    staging_bytes, ack, name, enable_events, max_queued_bytes
        As in `TierOptions`; sizes may be text. This tier is always staged.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.
    ImportError
        If no wheel of Mooncake can be imported.

    Notes
    -----
    The store evicts. For about 10 s after a machine died it still reports its objects as present;
    only loads are certain. `forget` affects all tiers of the namespace, those of other processes
    within 10 s.

    Use a metadata server with HTTP: its answer shows, before the client is set up, that `setup`
    will not block the interpreter for 90 s.
    """

    def __init__(
        self,
        master: str,
        metadata: str,
        threads: int = 4,
        *,
        namespace: Namespace,
        hostname: str = "localhost",
        protocol: str = "tcp",
        devices: str = "",
        segment_bytes: int | str = 0,
        prefix: str = "kvoffload",
        staging_bytes: int | str = STAGING_BYTES,
        ack: str = "copied",
        name: str = "mooncake",
        enable_events: bool = False,
        max_queued_bytes: int | str = MAX_QUEUED_BYTES,
    ) -> None:
        if not master.rpartition(":")[2].isdecimal():
            raise ValueError(f"master must be host:port, got {describe(master)}")
        if protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol must be 'tcp' or 'rdma', got {describe(protocol)}")
        settings = {  # in the order of the client's arguments
            "hostname": hostname,
            "metadata": metadata,
            "segment_bytes": check_size("segment_bytes", segment_bytes),
            "local_buffer_bytes": LOCAL_BUFFER_BYTES,
            "protocol": protocol,
            "devices": devices,
            "master": master,
        }
        options = TierOptions.read(
            threads, name, staging_bytes, ack, max_queued_bytes, enable_events=enable_events
        )
        store = MooncakeStore(namespace, settings, prefix)
        store.place = master
        super().__init__(store, options)


_CLIENTS: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[Any] = []  # while the process forks


def _keep_clients_for_good() -> None:
    """Prevent the destruction of clients in a forked child, which lacks their threads."""
    for client in _held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _held.extend(_CLIENTS),
        after_in_parent=_held.clear,
        after_in_child=_keep_clients_for_good,
    )


_READERS: Readers = {
    **STAGED,
    "metadata": ("metadata", str),
    "hostname": ("hostname", str),
    "protocol": ("protocol", str),
    "devices": ("devices", str),
    "segment": ("segment_bytes", parse_size),
    "prefix": ("prefix", str),
}


def open_mooncake(place: str, namespace: Namespace, **options: str) -> MooncakeTier:
    """Open ``mooncake://master:port?metadata=URL``; see `kvoffload.tiers.open_tier`."""
    arguments = read_options(options, _READERS)
    if "metadata" not in arguments:
        raise ValueError("option metadata must be given, as metadata=http://host:8080/metadata")
    return MooncakeTier(place.removeprefix("//"), namespace=namespace, **arguments)
