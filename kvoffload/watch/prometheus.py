"""A collector of watches for prometheus_client; needs the extra ``watch``."""

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
    """A collector of the metrics of watches, read at each scrape.

    A registry accepts one `WatchCollector`, since a metric can be registered only once: if a
    process has several managers, pass all of their watches.

    Parameters
    ----------
    watch : Watch or mapping of str to Watch
        A watch, or several by name; their managers must exist at the first scrape. With names, each
        series has the name as its label ``manager``.
    labels : mapping of str to str, optional
        Labels of every series.

    Raises
    ------
    TypeError
        If `watch` is neither, or `labels` is not a mapping of names to text.
    ValueError
        If `watch` is empty, or the name of a label is invalid or already a metric's own label.

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
                raise TypeError(f"watch must be a Watch or Watches by name, got {describe(each)}")
            if not isinstance(name, str):
                raise TypeError(f"watch must have names of type str, got {describe(name)}")
        if not watches:
            raise ValueError("watch must hold at least one Watch, got none")
        source_label = "manager" if isinstance(watch, Mapping) else None
        super().__init__(WATCH_PREFIX, WATCH_METRICS, labels, source_label)
        self.watch = watch
        self._watches = watches

    def _sources(self) -> Iterator[tuple[str, Iterator[Sample]]]:
        for name, watch in self._watches.items():
            yield name, samples(watch)
