"""Watches as a collector of prometheus_client; needs the extra ``watch``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvoffload._collector import TableCollector
from kvoffload._metrics import WATCH_METRICS, WATCH_PREFIX, Sample
from kvoffload.errors import describe

from ._watch import Watch
from .metrics import samples

__all__ = ["WatchCollector"]


class WatchCollector(TableCollector):
    """A collector of what watches see, looked up at each scrape.

    A registry takes one `WatchCollector`, since a metric may be registered once: where a process
    has several managers, give it all of their watches.

    Parameters
    ----------
    watch : Watch or mapping of str to Watch
        A watch whose manager is made by the time of the first scrape; or several by name. Their
        series then have the label ``manager``, the name.
    labels : mapping of str to str, optional
        Labels of every series.

    Raises
    ------
    TypeError
        If `watch` is neither, or `labels` is no mapping of names to text.
    ValueError
        If `watch` is empty, or a label's name is not Prometheus' or that of a metric's own label.

    Examples
    --------
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> from kvoffload import CPUOffloadingManager
    >>> from kvoffload.watch import Watch
    >>> from kvoffload.watch.prometheus import WatchCollector
    >>> managers = {
    ...     name: CPUOffloadingManager(16, 100_000, watch=Watch()) for name in ("chat", "code")
    ... }
    >>> registry = CollectorRegistry()
    >>> registry.register(WatchCollector({name: each.watch for name, each in managers.items()}))
    >>> b'kvoffload_asked_blocks_total{manager="code"} 0.0' in generate_latest(registry)
    True
    """

    def __init__(
        self, watch: Watch | Mapping[str, Watch], labels: Mapping[str, str] | None = None
    ) -> None:
        watches: dict[Any, Any] = dict(watch) if isinstance(watch, Mapping) else {"": watch}
        for name, each in watches.items():
            if not isinstance(each, Watch):
                raise TypeError(f"watch must be a Watch, or some by name, got {describe(each)}")
            if not isinstance(name, str):
                raise TypeError(f"watch must have names that are text, got {describe(name)}")
        if not watches:
            raise ValueError("watch must be one Watch at least, got none")
        source_label = "manager" if isinstance(watch, Mapping) else None
        super().__init__(WATCH_PREFIX, WATCH_METRICS, labels, source_label)
        self.watch = watch
        self._watches = watches

    def _sources(self) -> Iterator[tuple[str, Iterator[Sample]]]:
        for name, watch in self._watches.items():
            yield name, samples(watch)
