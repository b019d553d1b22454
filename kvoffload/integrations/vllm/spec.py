"""``KVOffloadSpec``, which vLLM loads by ``spec_name``, and the options of all such specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload.errors import describe
from kvoffload.managers._watching import WatchRequest
from kvoffload.policies import registry

from . import _upstream as vllm
from .groups import KVGroups
from .hints import IGNORED_METRIC
from .manager import CAPACITY_METRIC, KVOffloadManager
from .recording import RECORD, RECORD_MAX_BYTES, Recording, RequestRecorder
from .watching import WATCH, WatchExport, Watching, metric_definitions

_PACKAGE = __package__
_PREFIX = "kvoffload_"

#: Own keys of ``kv_connector_extra_config``.
OPTIONS = (RECORD, RECORD_MAX_BYTES, WATCH)

#: Keys of vLLM that are checked, since its errors do not name them: whole numbers with their
#: minimum; booleans; text.
_WHOLE = {"cpu_bytes_to_use": 1, "store_threshold": None, "max_tracker_size": 1}
_FLAGS = ("offload_prompt_only", "self_describing_kv_events")
_TEXTS = ("eviction_policy", "cache_policy_module_path")


def _check_options(extra_config: Mapping[str, Any]) -> None:
    unknown = sorted(key for key in extra_config if key.startswith(_PREFIX) and key not in OPTIONS)
    if unknown:
        raise ValueError(
            f"kv_connector_extra_config has unknown kvoffload keys: {', '.join(unknown)} "
            f"(known: {', '.join(OPTIONS)})"
        )
    for key, least in _WHOLE.items():
        if key in extra_config:
            _check_whole(key, extra_config[key], least)
    for key in _FLAGS:
        if extra_config.get(key, False) not in (False, True):  # 0 and 1 are, too
            raise TypeError(f"{key} must be true or false, got {describe(extra_config[key])}")
    for key in _TEXTS:
        value = extra_config.get(key, "")
        if not isinstance(value, str) and (value is not None or key == "eviction_policy"):
            raise TypeError(f"{key} must be text, got {describe(value)}")


def _check_whole(key: str, value: Any, least: int | None) -> None:
    """Check a number that vLLM reads with `int`, which also accepts text.

    Raise TypeError or ValueError if it is not one, or less than `least`.
    """
    try:
        parsed = None if isinstance(value, bool) else int(value)
    except TypeError:
        parsed = None
    except (ValueError, OverflowError):
        raise ValueError(f"{key} must be a whole number, got {describe(value)}") from None
    if parsed is None:
        raise TypeError(f"{key} must be a whole number, got {describe(value)}")
    if least is not None and parsed < least:
        raise ValueError(f"{key} must be >= {least}, got {describe(value)}")


def _policy_text(name: str, module_path: str | None) -> str | None:
    """Return the text of one of the library's policies, or None for a foreign policy.

    Raise ValueError if neither the library nor vLLM has the policy, or the module does not have it.
    An exception while importing the module of a policy that is registered with vLLM is passed on.
    """
    try:
        registry.parse(name, "eviction_policy")
        return name
    except ValueError as error:
        unknown = error
    if module_path == _PACKAGE:
        module_path = None
    try:
        vllm.CachePolicyFactory.get_cache_policy_cls(name)
        return None
    except ValueError as cause:  # it is not registered
        if module_path is None:
            raise unknown from cause
    try:
        vllm.CachePolicyFactory.get_cache_policy_cls(name, module_path)
    except (ImportError, AttributeError, AssertionError, TypeError, ValueError) as cause:
        raise ValueError(
            f"cache_policy_module_path must name a module with the policy {describe(name)}, got "
            f"{describe(module_path)}"
        ) from cause
    return None


class OwnPolicy(vllm.CPUOffloadingSpec):  # type: ignore[misc]
    """A spec that reads the policy, the recording and the watch from the configuration."""

    _manager: vllm.OffloadingManager | None
    eviction_policy: str

    def __init__(self, config: vllm.OffloadingConfig) -> None:
        _check_options(config.extra_config)
        self._recording = Recording.from_options(config.extra_config)
        self._watching = Watching.from_options(config.extra_config)
        super().__init__(config)
        if not self.num_chunks and config.worker_kv_bytes_per_block:
            raise ValueError(
                "cpu_bytes_to_use must be the bytes of one chunk of all workers at least, "
                f"{self.kv_bytes_per_chunk}, got {describe(self.extra_config['cpu_bytes_to_use'])}"
            )
        self._policy_text: str | None = None  # set with the manager

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's offloading metrics, those of kvoffload and, if configured, a watch's."""
        return {
            **super().build_metric_definitions(extra_config),
            IGNORED_METRIC: vllm.OffloadingCounterMetadata(
                "Actions, keys and values in hints of clients that were unknown or malformed."
            ),
            CAPACITY_METRIC: vllm.OffloadingGaugeMetadata(
                "Tokens of prompts that host memory has room for."
            ),
            **metric_definitions(extra_config),
        }

    def get_manager(self) -> vllm.OffloadingManager:
        """Return the manager, built at the first call and, if configured, recorded and watched.

        vLLM calls this when it starts, only in the scheduler's process: workers import no policy.
        Raise ValueError for an unknown policy, or a module that does not have it.
        """
        if self._manager is None:
            self._policy_text = _policy_text(self.eviction_policy, self.cache_policy_module_path)
            if self._policy_text is None:
                vllm.logger.warning(
                    "kvoffload: eviction_policy %r (cache_policy_module_path %r) is not a policy "
                    "of kvoffload; vLLM's own manager drives it",
                    self.eviction_policy,
                    self.cache_policy_module_path,
                )
            recorder = None
            if self._recording is not None:
                recorder = RequestRecorder(self._recording, self.config)
            manager = self._new_manager()
            own = getattr(manager, "primary_tier", manager)
            if isinstance(own, KVOffloadManager):
                vllm.logger.info(
                    "kvoffload: compiled %s active, policy %s, %d chunks",
                    "manager" if own is manager else "primary tier",
                    self._policy_text,
                    self.num_chunks,
                )
                if len(self.config.groups) == 1:
                    (group,) = self.config.groups
                    tokens = group.tokens_per_block * self.config.cache.blocks_per_chunk
                    own._capacity_tokens = self.num_chunks * tokens
            if recorder is not None:
                recorder.attach(manager)
            if self._watching is not None:
                self._watch(own, self._watching)
        return self._manager

    def _watch(self, own: Any, watching: Watching) -> None:
        """Attach a watch to a new manager of host memory, and export its metrics."""
        if not isinstance(own, KVOffloadManager):
            vllm.logger.warning(
                "kvoffload: %s needs a policy of kvoffload; nothing is watched", WATCH
            )
            return
        watch = watching.new_watch()
        own._look_on(WatchRequest(watch, self._policy_text), KVGroups.from_config(self.config))
        watch.set_declining(allowed=not own._stores_all)
        own._watch_export = WatchExport(watch, watching.interval)

    def _new_manager(self) -> vllm.OffloadingManager:
        """Build and keep the manager; for a foreign policy, vLLM's own."""
        return super().get_manager()


class KVOffloadSpec(OwnPolicy):
    """A spec of offloading to host memory with `KVOffloadManager` and vLLM's worker and metrics.

    ``{"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm"}`` in
    ``kv_connector_extra_config``; every option of vLLM's ``CPUOffloadingSpec`` is valid.

    Parameters
    ----------
    config : OffloadingConfig
        From vLLM.

    Raises
    ------
    TypeError, ValueError
        For ``secondary_tiers``, which only `KVOffloadTieringSpec` has, and for keys that begin with
        ``kvoffload_`` and are unknown or have a wrong value. An unknown policy is an error of
        `get_manager`.
    """

    def __init__(self, config: vllm.OffloadingConfig) -> None:
        if config.extra_config.get("secondary_tiers", []) != []:
            raise ValueError(
                "secondary_tiers must come with the spec_name 'KVOffloadTieringSpec', got "
                f"{describe(type(self).__name__)}"
            )
        super().__init__(config)

    def _new_manager(self) -> vllm.OffloadingManager:
        """Build the manager; for a foreign policy, vLLM's own."""
        if self._policy_text is None:
            return super()._new_manager()
        self._manager = KVOffloadManager(
            num_chunks=self.num_chunks,
            cache_policy=self._policy_text,
            enable_events=self.kv_events_config.enable_kv_cache_events,
            store_threshold=int(self.extra_config.get("store_threshold", 0)),
            max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
            info=getattr(self, "cpu_info", None),  # from 0.33 on
        )
        return self._manager
