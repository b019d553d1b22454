"""The recording of requests under vLLM, which the key ``kvoffload_record`` turns on.

A request is recorded when it finishes. Its context has all its keys by token position, whether or
not they were looked up or found on the accelerator; the record has those up to the last that it
loaded or offered for storing, in one step or many. So a record includes the answer exactly if vLLM
offloads answers (``offload_prompt_only`` false), and omits the part that an aborted request never
reached.

vLLM reports the finish of a request in the step after its last one, and a stopped engine may make
no further step: `vllm.LLM` always ends that way. So a request without a reported finish is recorded
when the manager is shut down or the interpreter ends.

A row has the hints of the request's client, read when the request first loads or offers: `ends`,
and `expect` in milliseconds. The source is not recorded.

With several KV groups each chunk of tokens has a key per group, and these share one block hash. A
block of the trace is a chunk of tokens, so one group represents all: among the full groups, if
there are any, the first with the fewest tokens per chunk.

Windows and states are kept for the last multiple of a chunk before a prompt's last token, and are
useless after it. A replay by groups derives that position from the recorded length: the length of
the chunks if the last loaded or offered key of windows and states ends before the last chunk, so
that the prompt may end with that chunk; otherwise one token more. If vLLM offloads answers, chunks
that full groups have offered beyond the next multiple are treated as an answer and omitted.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload import Hints
from kvoffload._checks import check_int
from kvoffload.errors import describe
from kvoffload.traces.lines import RECORDING
from kvoffload.traces.request_log import MIN_BYTES, RequestLog

from ._manager_c import hints_of  # type: ignore[import-not-found]
from ._upstream import OffloadingConfig, OffloadingManager, ReqContext, logger
from .groups import KVGroups

#: Keys of ``kv_connector_extra_config``.
RECORD = "kvoffload_record"
RECORD_MAX_BYTES = "kvoffload_record_max_bytes"

#: Default of the most bytes on disk.
MAX_BYTES = 2**30

_GROUP_BYTES = 4  # at the end of a key: the index of its group, big endian


@dataclass(frozen=True)
class Recording:
    """The path of a recording and its size limit."""

    path: Path  # the trace, ``.zst`` or ``.gz``
    max_bytes: int  # limit on disk

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Recording | None:
        """Read the two keys; None if recording is off.

        Raise TypeError or ValueError if a value is not a path or a number of bytes, or only the
        limit is given.
        """
        path = options.get(RECORD)
        max_bytes = check_int(RECORD_MAX_BYTES, options.get(RECORD_MAX_BYTES, MAX_BYTES), MIN_BYTES)
        if path is None:
            if RECORD_MAX_BYTES in options:
                raise ValueError(f"{RECORD_MAX_BYTES} needs {RECORD}")
            return None
        if not isinstance(path, str):
            raise TypeError(f"{RECORD} must be a path, got {describe(path)}")
        if Path(path).suffix not in RECORDING:
            raise ValueError(f"{RECORD} must end in .zst or .gz, got {describe(path)}")
        return cls(Path(path), max_bytes)

    def path_of(self, replica: int, num_replicas: int) -> Path:
        """Return the file of one data-parallel replica, since each has its own scheduler."""
        if num_replicas == 1:
            return self.path
        stem, *suffixes = self.path.name.split(".")
        return self.path.with_name(".".join([f"{stem}-replica{replica}", *suffixes]))


class RequestRecorder:
    """A recorder of the finished requests of a manager with vLLM's interface.

    `config` has the KV groups and the replica; `log` writes the trace. No error reaches the engine:
    if recording fails, it stops with one log line.

    Raises
    ------
    ValueError
        If the file cannot be written.
    MissingExtraError
        For ``.zst`` without the ``cli`` extra.

    Notes
    -----
    Complexity: O(keys of the request), once. Thread-safety: as the manager's.
    """

    def __init__(self, recording: Recording, config: OffloadingConfig) -> None:
        groups = KVGroups.from_config(config)
        others: dict[int, int] = {} if groups is None else groups.others
        full = [one for one in config.groups if one.group_id not in others]
        group = min(full or config.groups, key=lambda one: one.tokens_per_block)
        self._suffix = group.group_id.to_bytes(_GROUP_BYTES, "big")
        self._others = {group_id.to_bytes(_GROUP_BYTES, "big") for group_id in others}
        self._align = 0 if groups is None else groups.align
        self._has_answers = not config.extra_config.get("offload_prompt_only", True)
        self._one_group = len(config.groups) == 1
        self._chunk_tokens = group.tokens_per_block * config.cache.blocks_per_chunk
        parallel = config.parallel
        path = recording.path_of(parallel.data_parallel_index, parallel.data_parallel_size)
        try:
            self.log = RequestLog(
                path, block_tokens=self._chunk_tokens, max_bytes=recording.max_bytes
            )
        except OSError as cause:
            raise ValueError(f"{RECORD}: cannot write {path}: {cause.strerror}") from cause
        self._unfinished: dict[int, ReqContext] = {}  # by id(), in order of arrival
        self.log.finish_with(self)  # an engine may be dropped without a shutdown
        # registered after the log's own, so that it runs first; weak, so that it can be dropped
        atexit.register(_close_if_alive, weakref.ref(self))
        logger.info("kvoffload: recording requests to %s", path)

    def attach(self, manager: OffloadingManager) -> None:
        """Record the requests of a manager, and close the log with it.

        The methods are set on the object, so a manager without recording has no extra step.
        """
        finish, shut_down = manager.on_request_finished, manager.shutdown

        def reaching(prepare: Callable[..., Any]) -> Callable[..., Any]:
            def prepare_and_reach(keys: Collection[bytes], req_context: ReqContext) -> Any:
                result = prepare(keys, req_context)
                self.reach(keys, req_context)
                return result

            return prepare_and_reach

        def on_request_finished(req_context: ReqContext, **options: Any) -> None:
            finish(req_context, **options)
            self.record(req_context)

        def shutdown() -> None:
            self.close()
            shut_down()

        manager.prepare_load = reaching(manager.prepare_load)
        manager.prepare_store = reaching(manager.prepare_store)
        manager.on_request_finished = on_request_finished
        manager.shutdown = shutdown

    def reach(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Update the last token position that a request has reached. Raises nothing."""
        if not self.log.recording:
            return
        try:
            state = req_context.get_state(_Progress)
            if state is None:
                state = _Progress(hints_of(req_context)[0])
                req_context.set_state(state)
                self._unfinished[id(req_context)] = req_context
            position_of = req_context._offload_key_positions.get
            state.tokens = max([state.tokens, *[position_of(key, 0) for key in keys]])
            if self._others:
                others = [key for key in keys if key[-_GROUP_BYTES:] in self._others]
                state.tail = max([state.tail, *[position_of(key, 0) for key in others]])
        except Exception as error:  # noqa: BLE001 (no error may reach the engine)
            self._stop(error)

    def record(self, req_context: ReqContext) -> None:
        """Record a request, the first time that it is given. Raises nothing."""
        self._unfinished.pop(id(req_context), None)
        if not self.log.recording:
            return
        try:
            state = req_context.get_state(_Progress)
            if state is not None and not state.recorded:
                state.recorded = True
                tokens = state.tokens
                if self._others and self._has_answers:
                    tokens = min(tokens, state.tail + self._align)
                keys = self.chain(req_context._offload_key_positions, tokens)
                if keys:
                    end = len(keys) * self._chunk_tokens
                    more_tokens = int(bool(self._others) and state.tail >= end)
                    self.log.add(keys, more_tokens, state.hints)
        except Exception as error:  # noqa: BLE001 (no error may reach the engine)
            self._stop(error)

    def close(self) -> None:
        """Record the reached parts of unfinished requests, and close the log."""
        for req_context in list(self._unfinished.values()):
            self.record(req_context)
        self.log.close()

    def chain(self, positions: Mapping[bytes, int], tokens: int) -> list[bytes]:
        """Return the keys of the first `tokens` tokens by position, one key per chunk."""
        keys = list(positions)
        if not self._one_group:
            suffix = self._suffix
            keys = [key for key in keys if key[-_GROUP_BYTES:] == suffix]
        keys.sort(key=positions.__getitem__)
        # There may also be keys beyond the last chunk that counts, and inside a chunk.
        last = tokens // self._chunk_tokens
        if keys and (len(keys) != last or positions[keys[-1]] != last * self._chunk_tokens):
            keys = [
                key
                for key in keys
                if positions[key] <= tokens and positions[key] % self._chunk_tokens == 0
            ]
        return keys

    def _stop(self, error: Exception) -> None:
        self.log.recording = False
        logger.warning("kvoffload: recording stopped: %s", error)


def _close_if_alive(recorder: weakref.ref[RequestRecorder]) -> None:
    alive = recorder()
    if alive is not None:
        alive.close()


@dataclass(slots=True, eq=False)
class _Progress:
    """The progress of a request; state of its context, under this type."""

    hints: Hints | None  # its client's hints about its session
    tokens: int = 0  # end position of the last key that it loaded or offered
    tail: int = 0  # the same of the keys of windows and states
    recorded: bool = False  # written to the log
