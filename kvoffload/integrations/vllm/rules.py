"""The compiled policy, and the rules that drive it, for the text of a policy."""

from __future__ import annotations

from typing import Any

from kvoffload.policies import registry

from ._ranked_lru_c import LRURules, RankedLRU  # type: ignore[import-not-found]
from ._rules_c import ARCRules, ChainRules, UseRules  # type: ignore[import-not-found]
from ._upstream import Release


def make_rules(cache_policy: str, module_path: str | None, capacity: int, release: Release) -> Any:
    """Return the rules that drive the policy `cache_policy` in a release of vLLM.

    Raise TypeError or ValueError if the text names no policy of the library.
    """
    if not isinstance(cache_policy, str):
        raise TypeError(
            f"cache_policy must be the name of a policy, got {type(cache_policy).__name__}"
        )
    try:
        spec = registry.parse(cache_policy)
    except ValueError as cause:
        if module_path is None:
            raise
        raise ValueError(
            f"{cause}; a policy from cache_policy_module_path ({module_path!r}) needs vLLM's own "
            "manager"
        ) from None
    kind = spec.entry
    if kind.vllm == "lru":
        return LRURules(RankedLRU(capacity), release.provisional_ranks)
    policy = spec.build("c", capacity)
    if kind.vllm == "arc":
        return ARCRules(policy)
    if kind.learns_by_request:
        return ChainRules(policy)
    return UseRules(policy)
