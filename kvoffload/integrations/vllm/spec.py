"""``KVOffloadSpec`` and ``KVOffloadTieringSpec``: what vLLM loads by ``spec_name``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering import manager as tiering_manager
from vllm.v1.kv_offload.tiering import spec as tiering_spec

from kvoffload.managers._watching import WatchRequest
from kvoffload.policies import registry

from .manager import KVOffloadManager
from .policy_adapter import ADAPTED_POLICIES
from .primary_tier import KVOffloadPrimaryTier
from .recording import RECORD, RECORD_MAX_BYTES, Recording, RequestRecorder
from .versions import installed_release
from .watching import WATCH, WatchExport, Watching, metric_definitions

__all__ = ["KVOffloadSpec", "KVOffloadTieringSpec"]

logger = init_logger("vllm.kvoffload")

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
        If the policy is nobody's.
    """
    if module_path == _PACKAGE and name in ADAPTED_POLICIES:
        return ADAPTED_POLICIES[name]
    try:
        registry.parse(name)
    except ValueError:
        if module_path not in (None, _PACKAGE) or name in CachePolicyFactory._registry:
            return None
        raise
    return name


class _OwnPolicy(CPUOffloadingSpec):  # type: ignore[misc]
    """Read the configuration: which policy, and whose; whether to record, and to watch."""

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
        """Let a watch look on at a new manager, and export what it sees."""
        own = getattr(manager, "primary_tier", manager)
        if not isinstance(own, KVOffloadManager):
            logger.warning("kvoffload: %s needs a policy of kvoffload; nothing is watched", WATCH)
            return
        watch = watching.new_watch()
        own._look_on(WatchRequest(watch, self._policy_text))
        own._watch_export = WatchExport(watch, watching.interval)

    def _new_manager(self) -> OffloadingManager:
        """Build the manager and keep it; vLLM's own for a policy of others."""
        return super().get_manager()


class KVOffloadSpec(_OwnPolicy):
    """Offload to host memory with `KVOffloadManager`; the worker and all metrics are vLLM's.

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


# Held while the class below is exchanged.
_exchange = threading.Lock()


class KVOffloadTieringSpec(_OwnPolicy, tiering_spec.TieringOffloadingSpec):  # type: ignore[misc]
    """Put vLLM's secondary tiers behind a primary tier of this package.

    ``{"spec_name": "KVOffloadTieringSpec", "spec_module_path": "kvoffload.integrations.vllm"}`` in
    ``kv_connector_extra_config``; every option of vLLM's ``TieringOffloadingSpec`` holds.

    vLLM names the class of its primary tier inside ``get_manager``. While that runs, and only
    then, the name stands for `KVOffloadPrimaryTier`.

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
        """Build vLLM's tiering manager over our primary tier.

        Raises
        ------
        RuntimeError
            If vLLM's module does not have the class that is to be exchanged.
        """
        if self._policy_text is None:
            return super()._new_manager()
        name = "CPUPrimaryTierOffloadingManager"
        with _exchange:
            original = getattr(tiering_spec, name, None)
            if original is None or original is not getattr(tiering_manager, name, None):
                raise RuntimeError(
                    f"kvoffload: {tiering_spec.__name__}.{name} is not vLLM's own class, so the "
                    "primary tier cannot be exchanged"
                )
            own_policy, self.eviction_policy = self.eviction_policy, self._policy_text
            setattr(tiering_spec, name, KVOffloadPrimaryTier)
            try:
                manager = super()._new_manager()
            finally:
                setattr(tiering_spec, name, original)
                self.eviction_policy = own_policy
        if not isinstance(manager.primary_tier, KVOffloadPrimaryTier):
            raise RuntimeError("kvoffload: vLLM did not build the primary tier by its known name")
        logger.info(
            "kvoffload: compiled primary tier active, policy %s, %d chunks",
            self._policy_text,
            self.num_chunks,
        )
        return manager
