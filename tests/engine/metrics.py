"""A server's ``/metrics`` as numbers that can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvoffload._metrics import TIER_PREFIX

Labels = frozenset[tuple[str, str]]
OF_THE_SERVER = ("engine", "model_name")
OFFLOAD = "vllm:kv_offload_"
TIER = f"vllm:{TIER_PREFIX}"
PREFIX_CACHE = ("vllm:prefix_cache_", "vllm:external_prefix_cache_", "vllm:prompt_tokens")


@dataclass(frozen=True)
class Metrics:
    """Samples by name and labels, without the labels that tell servers apart."""

    samples: Mapping[tuple[str, Labels], float]

    @classmethod
    def parse(cls, text: str) -> Metrics:
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = frozenset(
                    (name, value)
                    for name, value in sample.labels.items()
                    if name not in OF_THE_SERVER
                )
                samples[sample.name, labels] = sample.value
        return cls(samples)

    def value(self, name: str, **labels: str) -> float:
        """Return one sample; 0 where it has never been counted."""
        return self.samples.get((name, frozenset(labels.items())), 0.0)

    def disk(self, name: str, **labels: str) -> float:
        """Return one sample of the disk tier's."""
        return self.tier(name, "disk", **labels)

    def tier(self, name: str, tier: str, **labels: str) -> float:
        """Return one sample of a tier's."""
        return self.value(f"{TIER}{name}", tier=tier, **labels)

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompts that were computed, neither found on the device nor loaded."""
        return int(self.value("vllm:prompt_tokens_by_source_total", source="local_compute"))

    @property
    def loaded_tokens(self) -> int:
        """Tokens of prompts that were loaded from the offload cache."""
        return int(self.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))

    @property
    def device_tokens(self) -> int:
        """Tokens of prompts that the device's prefix cache had."""
        return int(self.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit"))

    def decisions(self) -> dict[tuple[str, Labels], float]:
        """Return what depends on the requests and on the decisions made, and not on the clock."""
        return {
            (name, labels): value
            for (name, labels), value in self.samples.items()
            if name.startswith((OFFLOAD, *PREFIX_CACHE))
            and not name.endswith("_created")
            and "_time" not in name
            and not ("_seconds" in name and not name.endswith("_count"))
        }
