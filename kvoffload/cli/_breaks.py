"""Findings on text that breaks the prefixes of a log's prompts, as the commands say them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import click

from kvoffload.advise.units import percent_text
from kvoffload.traces.breaks import Break, PrefixBreaks

from ._sources import Source

show_text_option = click.option(
    "--show-text",
    is_flag=True,
    help="Show up to 40 characters of a text that breaks prefixes, from the prompts of a log.",
)


@dataclass(frozen=True, slots=True)
class Broken:
    """Texts that break prefixes, and the ideal hit ratio as it is and without them.

    The ratios are None for a log that can be read only once; with more than the sample, the shares
    of its requests are `estimated`.
    """

    breaks: list[Break]
    ratio: float | None = None
    without: float | None = None
    shows_text: bool = False
    estimated: bool = False

    @classmethod
    def of(
        cls, source: Source, sample: PrefixBreaks, ratio: float | None = None, *, shows_text: bool
    ) -> Broken:
        """Look for it in a log that has been read, and read the log again if there is some.

        `ratio` is the ideal hit ratio, if it is known.
        """
        found = sample.found() if source.trace.has_prompts else []
        if not found or source.is_copy:
            return cls(found, shows_text=shows_text, estimated=sample.is_part)
        if ratio is None:
            ratio = _ideal(source)
        sample.cuts = True
        without = _ideal(source)
        sample.cuts = False
        return cls(sample.counted, ratio, without, shows_text)

    @property
    def text(self) -> str | None:
        """All of it in a sentence or two; None if nothing breaks prefixes."""
        if not self.breaks:
            return None
        parts = ", and ".join(
            f"{self._place(each)}, in {self._share(each)}" for each in self.breaks
        )
        if self.ratio is None or self.without is None:
            return f"{parts}."
        return (
            f"{parts}. An unbounded cache would hit {percent_text(self.without)} of the blocks "
            f"without that, and {percent_text(self.ratio)} as it is."
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return it as rows of a table."""
        found = [(self._place(each), f"in {self._share(each)}") for each in self.breaks]
        if self.without is not None:
            found.append(("ideal hit ratio without that", percent_text(self.without)))
        return [(f"breaks prefixes: {name}", value) for name, value in found]

    def as_object(self) -> dict[str, object]:
        """Return it as fields of ``--json``."""
        breaks = [asdict(each) for each in self.breaks]
        for each in breaks:
            if not self.shows_text:
                del each["text"]
        return {"breaks": breaks, "ideal_hit_ratio_without_breaks": self.without}

    def _share(self, found: Break) -> str:
        about = f"about {100 * found.requests:.0f} %"
        return f"{about if self.estimated else percent_text(found.requests)} of the requests"

    def _place(self, found: Break) -> str:
        return found.place + (f" ({found.text!r})" if self.shows_text else "")


def _ideal(source: Source) -> float | None:
    """Return the hit ratio of a cache without bounds; the log is read again."""
    return source.survey("reading again", None).ideal_hit_ratio
