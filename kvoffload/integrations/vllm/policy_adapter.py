"""The library's policies behind vLLM's own policy interface: classes for ``eviction_policy``.

They are named in vLLM's configuration together with ``cache_policy_module_path``. That interface
cannot express admission: a policy that would decline a store only evicts here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

from kvoffload._checks import check_cache_capacity

from ._policy_adapter_c import AdapterCore
from ._rules_c import RequestRules
from .rules import make_rules
from .versions import Release, installed_release

__all__ = [
    "ADAPTED_POLICIES",
    "KVOffloadARC",
    "KVOffloadARCClassic",
    "KVOffloadHitDensity",
    "KVOffloadLFU",
    "KVOffloadLRU",
    "KVOffloadS3FIFO",
    "KVOffloadSLRU",
    "KVOffloadSieve",
    "PolicyAdapter",
]


class PolicyAdapter(AdapterCore, CachePolicy):  # type: ignore[misc]
    """A policy of the library in the form that vLLM's CPU manager drives.

    A further policy is a subclass with `policy_text`. vLLM builds it as ``cls(cache_capacity=n)``,
    so options stand in the text.

    Parameters
    ----------
    cache_capacity : int
        Chunks that fit in host memory.
    """

    policy_text: ClassVar[str]
    _release: ClassVar[Release] = installed_release()
    cache_capacity: int
    _rules: RequestRules

    def __init__(self, cache_capacity: int) -> None:
        CachePolicy.__init__(self, check_cache_capacity(cache_capacity))
        self._rules = make_rules(
            self.policy_text, None, self.cache_capacity, self._release, only_evicts=True
        )
        self._open(self._rules, ReqContext)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: ReqContext,
    ) -> None:
        """Count what a request has used as one access."""
        keys = order_request_keys(key_groups, req_context)
        self._finish(keys, insertion_only_keys, reused_keys)

    def __getattr__(self, name: str) -> OrderedDict[bytes, Any]:
        # The lists of vLLM's own policies, as copies: chunks; t1, t2, b1, b2.
        if name.startswith("_"):
            raise AttributeError(name)
        self._require_ready()
        keys = self._rules.keys(name)
        return OrderedDict((key, self.get(key)) for key in keys)


class KVOffloadLRU(PolicyAdapter):
    """Least recently used; decides as vLLM's ``lru`` does."""

    policy_text = "lru"


class KVOffloadARC(PolicyAdapter):
    """Adaptive replacement; decides as vLLM's ``arc`` does."""

    policy_text = "arc"

    @property
    def target_t1_size(self) -> float:
        """Size that T1 should have, in chunks; can be set."""
        self._require_ready()
        target: float = self._rules.target_t1_size
        return target

    @target_t1_size.setter
    def target_t1_size(self, value: float) -> None:
        self._require_ready()
        self._rules.target_t1_size = value


class KVOffloadARCClassic(PolicyAdapter):
    """Adaptive replacement as published: a key that is remembered returns to T2."""

    policy_text = "arc-classic"


class KVOffloadHitDensity(PolicyAdapter):
    """Hit density: what brings the fewest hits for its room leaves; here it stores everything."""

    policy_text = "hit-density"


class KVOffloadSLRU(PolicyAdapter):
    """LRU in two segments: what was used again is protected."""

    policy_text = "slru"


class KVOffloadLFU(PolicyAdapter):
    """Least frequently used, counts age."""

    policy_text = "lfu"


class KVOffloadSieve(PolicyAdapter):
    """SIEVE: the oldest that was not used since the hand last passed leaves."""

    policy_text = "sieve"


class KVOffloadS3FIFO(PolicyAdapter):
    """S3-FIFO: what is new and not used soon leaves first."""

    policy_text = "s3fifo"


#: Name of the class -> text of the policy, for the managers that need no such class.
ADAPTED_POLICIES = {
    policy_class.__name__: policy_class.policy_text
    for policy_class in (
        KVOffloadLRU,
        KVOffloadARC,
        KVOffloadARCClassic,
        KVOffloadHitDensity,
        KVOffloadSLRU,
        KVOffloadLFU,
        KVOffloadSieve,
        KVOffloadS3FIFO,
    )
}
