"""A collector of tiers for prometheus_client; needs the extra ``watch``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvoffload._collector import TableCollector
from kvoffload._metrics import TIER_METRICS, TIER_PREFIX, Sample
from kvoffload.errors import describe

from .base import Tier


class TierCollector(TableCollector):
    """A collector of the metrics of tiers, read at each scrape.

    A registry accepts one `TierCollector`, since a metric can be registered only once: pass all
    tiers of the process. Each series has the label ``tier``, the tier's name.

    Parameters
    ----------
    tiers : Tier or iterable of Tier
        One or several tiers of this package, with distinct names.
    labels : mapping of str to str, optional
        Labels of every series.

    Raises
    ------
    TypeError
        If `tiers` holds anything else, or `labels` is not a mapping of names to text.
    ValueError
        If `tiers` is empty or two have the same name, or the name of a label is invalid or already
        a metric's own label.

    Notes
    -----
    Thread-safety: a scrape reads counters and sizes in its own thread while another uses the tiers;
    a closed tier reports its last values.

    Examples
    --------
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> from kvoffload.tiers import MemoryTier, Namespace
    >>> from kvoffload.tiers.prometheus import TierCollector
    >>> tier = MemoryTier(2**30, namespace=Namespace("model", 4096))
    >>> registry = CollectorRegistry()
    >>> registry.register(TierCollector(tier))
    >>> b'kvoffload:tier_hits_total{tier="memory"} 0.0' in generate_latest(registry)
    True
    """

    def __init__(
        self, tiers: Tier | Iterable[Tier], labels: Mapping[str, str] | None = None
    ) -> None:
        found: list[Any] = [tiers]
        if not isinstance(tiers, Tier) and isinstance(tiers, Iterable):
            found = list(tiers)
        for tier in found:
            if not isinstance(tier, Tier) or not hasattr(tier, "samples"):
                raise TypeError(f"tiers must be tiers of kvoffload.tiers, got {describe(tier)}")
        if not found:
            raise ValueError("tiers must hold at least one tier, got none")
        names = [tier.name for tier in found]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tiers must have distinct names, got {name!r} twice")
        super().__init__(TIER_PREFIX, TIER_METRICS, labels, "tier")
        self.tiers = tuple(found)

    def _sources(self) -> Iterator[tuple[str, Iterator[Sample]]]:
        for tier in self.tiers:
            yield tier.name, tier.samples()
