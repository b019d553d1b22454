"""Rows of replayed configurations in every form: tables, CSV, JSON and pictures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoffload._printable import plural
from kvoffload.advise.remarks import group_remarks
from kvoffload.replay import Configuration

from ._decoding import Decoded
from ._fields import Row, as_object
from ._hint_options import hints_object, hints_text
from ._model_options import groups_object

_NS_A_MS = 10**6


@dataclass(frozen=True, slots=True)
class View:
    """Configurations that were replayed over one trace."""

    read: Decoded
    rows: Sequence[Row]
    model: str | None = None  # the model and the bytes of a block or slot, in words

    @property
    def first(self) -> Configuration:
        """The first configuration: all have its groups, its rates and its loop."""
        return self.rows[0].configuration

    @property
    def in_time(self) -> Configuration:
        """The first configuration that is not served in turn, if there is one."""
        every = (row.configuration for row in self.rows)
        return next((one for one in every if not one.is_in_turn), self.first)

    @property
    def no_tokens(self) -> str | None:
        """The reason why no share of tokens is known; None if it is."""
        if self.read.block_tokens.count is None:
            return "no block size fits all requests: give --block-tokens"
        return None

    def title(self) -> list[str]:
        """Return what all rows have in common, in lines of words."""
        first, read, trace = self.first, self.read, self.read.trace
        facts = [*read.source.names]
        if read.block_tokens.count is not None:
            facts.append(str(read.block_tokens))
        facts += [plural(trace.num_requests, "request"), plural(trace.num_blocks, "block")]
        facts.append(f"{trace.unique_blocks:,} unique")
        if first.device and self.in_time.is_in_turn:
            found = f"{first.device:,} slots on device"
            if first.groups.is_plain:
                found = f"{self.rows[0].result.device_hits:,} found in {first.device:,} on device"
            facts.append(found)
        if first.pending:
            facts.append(f"stores in flight for {plural(first.pending, 'request')}")
        if first.groups.step_tokens is not None:
            facts.append(f"offered in steps of {first.groups.step_tokens:,} tokens")
        remarks = [hints_text(read.hints, trace.hints), engine_text(self.in_time), self.model]
        return ["; ".join(facts), *filter(None, remarks), *group_remarks(first.groups)]

    def as_object(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        first, groups, read = self.first, self.first.groups, self.read
        return {
            **read.source.head(),
            "bad_lines": read.source.trace.bad_lines,
            "unique_blocks": read.trace.unique_blocks,
            "block_bytes": first.block_bytes or None,
            "block_tokens": read.block_tokens.count,
            "block_tokens_from": read.block_tokens.origin,
            "no_token_hit_ratio": self.no_tokens,
            **read.order,
            "step_tokens": groups.step_tokens,
            "hints": hints_object(read.hints, read.trace.hints),
            "loop": first.loop,
            "prefill_tokens_per_second": first.rate,
            "link_bandwidth": first.link,
            "tier_bandwidth": first.tier_link,
            "decode_ms": first.decode_ns / _NS_A_MS,
            "slots": first.slots,
            "seed": first.seed,
            **groups_object(groups),
            **self.more(),
            "results": [as_object(row) for row in self.rows],
        }

    def more(self) -> Mapping[str, object]:
        """Return what a command adds to the object."""
        return {}

    def draw(self, path: str) -> None:
        """Draw the rows into a file, for ``--plot``."""
        raise NotImplementedError

    @abstractmethod
    def print(self) -> None:
        """Print the rows as tables."""


def engine_text(configuration: Configuration) -> str | None:
    """Return the times of an engine and the loop in words; None if requests come in turn."""
    one = configuration
    if one.is_in_turn:
        return None
    if one.rate is None:
        text = "no rate: prompts take no time"
    else:
        text = f"{one.rate:,} prompt tokens per second and engine"
        text += f", {one.decode_ns / _NS_A_MS:g} ms per token of an answer"
        if one.slots:
            text += f", at most {one.slots:,} requests per engine at once"
    loops = {"closed": "; each session waits for its answers", "recorded": "; recorded waits"}
    return text + loops.get(one.loop, "")
