"""``KVOffloadSpec``, which vLLM loads by ``spec_name``, and what every such spec reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvoffload.managers._watching import WatchRequest
from kvoffload.policies import registry

from ._upstream import (
    CachePolicyFactory,
    CPUOffloadingSpec,
    OffloadingConfig,
    OffloadingManager,
    installed_release,
)
from .groups import KVGroups
from .manager import KVOffloadManager
from .recording import RECORD, RECORD_MAX_BYTES, Recording, RequestRecorder
from .watching import WATCH, WatchExport, Watching, metric_definitions

__all__ = ["KVOffloadSpec", "OwnPolicy"]

logger = logging.getLogger("vllm.kvoffload")

_PACKAGE = __package__
_PREFIX = "kvoffload_"

#: Own keys of ``kv_connector_extra_config``.
OPTIONS = (RECORD, RECORD_MAX_BYTES, WATCH)


def _check_options(extra_config: Mapping[str, Any]) -> None:
    unknown = sorted(key for key in extra_config if key.startswith(_PREFIX) and key not in OPTIONS)
    if unknown:
        raise ValueError(
            f"kv_connector_extra_config has unknown kvoffload keys: {', '.join(unknown)} "
            f"(known: {', '.join(OPTIONS)})"
        )


def _policy_text(name: str, module_path: str | None) -> str | None:
    """Return the text of one of the library's policies, or None if it is someone else's.

    Raises
    ------
    ValueError
        If neither the library nor vLLM knows it.
    """
    try:
        registry.parse(name)
    except ValueError:
        if module_path in (None, _PACKAGE) and not _is_vllms(name):
            raise
        return None
    return name


def _is_vllms(name: str) -> bool:
    """Return whether vLLM knows a policy of that name without a module path."""
    try:
        CachePolicyFactory.get_cache_policy_cls(name)
    except ValueError:
        return False
    return True


class OwnPolicy(CPUOffloadingSpec):  # type: ignore[misc]
    """A spec that reads the policy, the recording and the watch from the configuration."""

    _manager: OffloadingManager | None
    eviction_policy: str

    def __init__(self, config: OffloadingConfig) -> None:
        _check_options(config.extra_config)
        self._recording = Recording.from_options(config.extra_config)
        self._watching = Watching.from_options(config.extra_config)
        super().__init__(config)
        self._policy_text = _policy_text(self.eviction_policy, self.cache_policy_module_path)
        if self._policy_text is None:
            logger.warning(
                "kvoffload: eviction_policy %r (cache_policy_module_path %r) is not a policy of "
                "kvoffload; vLLM's own manager drives it",
                self.eviction_policy,
                self.cache_policy_module_path,
            )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's metrics of offloading and, if so configured, those of a watch."""
        return {
            **super().build_metric_definitions(extra_config),
            **metric_definitions(extra_config),
        }

    def get_manager(self) -> OffloadingManager:
        """Return the manager, built at the first call; if so configured, recorded and watched."""
        if self._manager is None:
            recorder = None
            if self._recording is not None:
                recorder = RequestRecorder(self._recording, self.config)
            manager = self._new_manager()
            if recorder is not None:
                recorder.attach(manager)
            if self._watching is not None:
                self._watch(manager, self._watching)
        return self._manager

    def _watch(self, manager: Any, watching: Watching) -> None:
        """Attach a watch to a new manager, and export its metrics."""
        own = getattr(manager, "primary_tier", manager)
        if not isinstance(own, KVOffloadManager):
            logger.warning("kvoffload: %s needs a policy of kvoffload; nothing is watched", WATCH)
            return
        watch = watching.new_watch()
        own._look_on(WatchRequest(watch, self._policy_text), KVGroups.from_config(self.config))
        own._watch_export = WatchExport(watch, watching.interval)

    def _new_manager(self) -> OffloadingManager:
        """Build the manager and keep it; vLLM's own for a policy of others."""
        return super().get_manager()


class KVOffloadSpec(OwnPolicy):
    """Offloading to host memory with `KVOffloadManager`; the worker and all metrics are vLLM's.

    ``{"spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload.integrations.vllm"}`` in
    ``kv_connector_extra_config``; every option of vLLM's ``CPUOffloadingSpec`` holds.

    Parameters
    ----------
    config : OffloadingConfig
        From vLLM.

    Raises
    ------
    TypeError, ValueError
        For an unknown policy, and for keys that begin with ``kvoffload_`` and are unknown or have a
        wrong value.
    """

    def _new_manager(self) -> OffloadingManager:
        """Build the manager; vLLM's own for a policy of others."""
        if self._policy_text is None:
            return super()._new_manager()
        self._manager = KVOffloadManager(
            num_chunks=self.num_chunks,
            cache_policy=self._policy_text,
            enable_events=self.kv_events_config.enable_kv_cache_events,
            store_threshold=int(self.extra_config.get("store_threshold", 0)),
            max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
            **installed_release().manager_options(self),
        )
        logger.info(
            "kvoffload: compiled manager active, policy %s, %d chunks",
            self._policy_text,
            self.num_chunks,
        )
        return self._manager
