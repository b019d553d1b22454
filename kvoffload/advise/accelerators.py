"""Rates of accelerators, from their makers' data sheets.

Prefill is bound by arithmetic: a token takes 2 operations per active parameter (Kaplan et al.,
"Scaling Laws for Neural Language Models", 2020, section 2.1; attention itself left out). Prefill
reaches about `SHARE_OF_PEAK` of the peak of a data sheet, and a link moves about `SHARE_OF_LINK` of
its nominal rate. Both are assumptions to start from, below the best measurements; figures of the
user's own engine can be given instead.

Sources of the figures, besides the data sheet that each accelerator names:

- NVIDIA's accelerators, except the link of the B200: NVIDIA's table for sizing engines,
  https://github.com/ai-dynamo/aiconfigurator/tree/095f58a51c4ca8e61b66ec108d86f223f8d559ce/aic-core/src/aiconfigurator_core/systems
- memory and links of H100, H200, B200 and MI300X: the makers' descriptions of the systems that they
  measured, https://github.com/mlcommons/inference_results_v4.1/tree/a2f5d66d17e8f75c02fd74dfe810ecca6a046696/closed
- arithmetic of the MI300X, and the best measurements:
  https://github.com/stas00/ml-engineering/blob/744d01e18b79512572f64a6bbd8b5f4a725203a7/compute/accelerator/README.md
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import unknown_name

SHARE_OF_PEAK = 0.5
"""Share of the peak of dense bfloat16 arithmetic that prefill is assumed to reach.

Plain products of large matrices reach 0.51 (MI300X) to 0.87 (A100), with 0.80 on an H100: the table
of achievable FLOPS in the last source above.
"""

SHARE_OF_LINK = 0.8
"""Share of a link's nominal bandwidth that copies of whole blocks are assumed to reach.

Large copies reach 55 of 64 GB/s, 0.86, on an H200: ``network/README.md`` of the last source above.
"""

MEMORY_SHARE = 0.92
"""Share of its memory that vLLM takes by default (``--gpu-memory-utilization``).

The default of ``CacheConfig.gpu_memory_utilization`` in ``vllm/config/cache.py`` of 0.31, 0.32 and
0.33.
"""

# 16 lanes of 16 or 32 gigatransfers per second, one direction, nominal: the two bits of 130 that
# encoding takes are not subtracted
_PCIE_4, _PCIE_5 = 32e9, 64e9


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator.

    Attributes
    ----------
    name : str
        The name that users type.
    memory : int
        Its memory, bytes.
    flops : float
        Dense bfloat16 operations per second, at the peak.
    link : float
        Nominal bytes per second between it and host memory, one direction.
    source : str
        Address of the data sheet.
    """

    name: str
    memory: int
    flops: float
    link: float
    source: str

    def prefill_rate(self, active_parameters: float) -> float:
        """Return the estimated prefill, tokens per second, of a model."""
        return SHARE_OF_PEAK * self.flops / (2 * active_parameters)

    @property
    def link_bandwidth(self) -> float:
        """Estimated bytes per second between it and host memory, one direction."""
        return SHARE_OF_LINK * self.link


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_AMD = "https://www.amd.com/en/products/accelerators"
_ACCELERATORS = (
    Accelerator("l4", 24 * 10**9, 121e12, _PCIE_4, f"{_NVIDIA}/l4/"),
    Accelerator("l40s", 48 * 10**9, 362e12, _PCIE_4, f"{_NVIDIA}/l40s/"),
    Accelerator("a100-80gb", 80 * 10**9, 312e12, _PCIE_4, f"{_NVIDIA}/a100/"),
    Accelerator("h100", 80 * 10**9, 989e12, _PCIE_5, f"{_NVIDIA}/h100/"),
    Accelerator("h200", 141 * 10**9, 989e12, _PCIE_5, f"{_NVIDIA}/h200/"),
    Accelerator("b200", 180 * 10**9, 2250e12, _PCIE_5, f"{_NVIDIA}/hgx/"),
    Accelerator("mi300x", 192 * 10**9, 1307e12, _PCIE_5, f"{_AMD}/instinct/mi300/mi300x.html"),
)
_BY_NAME = {found.name: found for found in _ACCELERATORS}


def accelerator_names() -> tuple[str, ...]:
    """Return the names of the known accelerators."""
    return tuple(_BY_NAME)


def accelerator(name: str) -> Accelerator:
    """Return an accelerator by name; case does not matter.

    Raises
    ------
    ValueError
        If it is not known; the message lists the known ones and the nearest.
    """
    found = _BY_NAME.get(name.lower())
    if found is None:
        raise unknown_name("accelerator", name, _BY_NAME)
    return found
