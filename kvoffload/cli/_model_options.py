"""Options, shared by several commands, that name the model whose cache is kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import click

from kvoffload.advise import model_shape
from kvoffload.advise.model_groups import DTYPE_BYTES
from kvoffload.advise.model_shape import ModelShape
from kvoffload.advise.retention import or_none
from kvoffload.advise.units import bytes_text
from kvoffload.errors import describe
from kvoffload.replay.groups import GroupChunks, GroupLayout, Retention

from ._options import bundled, check_number, of_text
from ._sources import refuse_given

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Interval:
    """A retention interval that was given; an option that was not is None."""

    tokens: Retention  # 0 for only the last resume point, None for all

    def __str__(self) -> str:
        return str(or_none(self.tokens))


def read_model(text: str) -> ModelShape:
    """Read the name of a model, or the path to its configuration."""
    try:
        return model_shape(text)
    except OSError as error:
        raise ValueError(f"{error.filename or text}: {error.strerror}") from None


def read_interval(text: str) -> Interval:
    """Read a retention interval: 0, tokens, or none."""
    if text.lower() == "none":
        return Interval(None)
    check_number(text)
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"must be 0, a number of tokens or none, got {describe(text)}")
    return Interval(int(text))


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """A model and how its cache is kept, as given."""

    model: ModelShape | None
    kv_cache_dtype: str | None
    tensor_parallel: int | None
    retention: Interval | None  # where windows and states can be resumed
    step_tokens: int | None = None  # no effect if all layers are one full group
    kv_bytes_per_token: int | None = None  # of any other model

    @property
    def dtype(self) -> str:
        """Element type of the cache."""
        return self.kv_cache_dtype or "bfloat16"

    def check(self) -> None:
        """Refuse options that would have no effect, or a division that the model does not allow."""
        if self.model is None:
            names = ("kv_cache_dtype", "tensor_parallel", "retention")
            refuse_given("must go with --model, got it without", *names)
            return
        refuse_given("must go without --model, got both", "block_bytes", "kv_bytes_per_token")
        layout = self.layout()
        if layout is None:
            self.token_bytes()
        if self.retention is not None and (layout is None or not layout.is_sparse):
            raise click.UsageError(
                "--retention must go with a model that has windows or states, got "
                f"{self.retention} with {self.model.name}, which has none"
            )

    def on_workers(self, workers: int) -> CacheOptions:
        """Return these options with the workers that hold the model, if none were given.

        Return them unchanged if the layers cannot be divided among that many.
        """
        if self.model is None or self.tensor_parallel is not None or workers == 1:
            return self
        try:
            self.model.layout(self.dtype, workers)
        except ValueError:
            return self
        return replace(self, tensor_parallel=workers)

    def layout(self) -> GroupLayout | None:
        """Return the groups of the model; None without one, or if all layers are one full group."""
        if self.model is None:
            return None
        layout = self._of_model(self.model.layout)
        return None if [group.kind for group in layout.groups] == ["full"] else layout

    def groups(self, block_tokens: int | None, block_bytes: int | None = None) -> GroupChunks:
        """Return the groups for blocks of that many tokens, if the number is known.

        `block_bytes` is used without a model.
        """
        if self.model is not None and block_tokens is None:
            raise click.UsageError("--model needs --block-tokens: no block size fits all requests")
        layout = self.layout()
        try:
            if layout is None or block_tokens is None:
                size = (block_tokens or 0) * (self.token_bytes() or 0) or block_bytes or 0
                return GroupChunks.of_blocks(
                    block_tokens, block_bytes=size, step_tokens=self.step_tokens
                )
            interval = 0 if self.retention is None else self.retention.tokens
            return GroupChunks.of(layout, block_tokens, interval, step_tokens=self.step_tokens)
        except ValueError as error:
            text = str(error).replace("block_tokens", "--block-tokens", 1)
            text = text.replace("block_bytes", "the bytes of a block", 1)
            text = f"--{text}" if text.startswith("retention") else text
            raise click.UsageError(text) from None

    def text(self, groups: GroupChunks) -> str | None:
        """Return the model and the bytes of a block or slot, in words; None without a model."""
        if self.model is None:
            return None
        text = f"{self.model.name}, {self.dtype}: {bytes_text(groups.slot_bytes)} per"
        if groups.is_plain:
            return f"{text} block"
        kinds = Counter(group.kind for group in groups.layout.groups)
        parts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"{text} slot, groups: {parts}; retention {or_none(groups.retention)}"

    def token_bytes(self) -> int | None:
        """Return the bytes per token if all layers are one full group; None without a model."""
        return None if self.model is None else self._of_model(self.model.bytes_per_token)

    def _of_model(self, ask: Callable[[str, int], Found]) -> Found:
        """Return what the model says of this element type on these workers."""
        try:
            return ask(self.dtype, self.tensor_parallel or 1)
        except ValueError as error:
            option = "tensor-parallel" if str(error).startswith("tensor_parallel") else "model"
            raise click.UsageError(f"--{option}: {error}") from None


model_options = bundled(
    "cache",
    CacheOptions,
    click.option(
        "--retention",
        **of_text("0|N|none", read_interval),
        help="Where a prompt can be resumed from windows and states of the model "
        "(--prefix-cache-retention-interval of vllm serve): only at its end (0), also after "
        "every N tokens, or everywhere (none).  [default: 0]",
    ),
    click.option(
        "--tensor-parallel",
        type=click.IntRange(1, 2**16),
        help="Workers that each layer of the model is divided among.  [default: 1; for "
        "advise, as many as hold the model]",
    ),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(list(DTYPE_BYTES)),
        help="Element type of the model's KV cache.  [default: bfloat16]",
    ),
    click.option(
        "--model",
        **of_text("MODEL", read_model),
        help="Model whose KV cache is offloaded: the path of its config.json, or its name as "
        "for vllm serve; kvoffload models lists the known names.",
    ),
)
"""The options that name a model and say how its cache is kept: ``cache``.

It has the ``--step-tokens`` and the ``--kv-bytes-per-token`` of the command, too.
"""


def groups_object(groups: GroupChunks) -> dict[str, object]:
    """Return the JSON fields of a model's groups; none if all layers are one full group."""
    if groups.is_plain:
        return {}
    pairs = zip(groups.layout.groups, groups.chunk_tokens, strict=True)
    return {
        "groups": [asdict(group) | {"chunk_tokens": tokens} for group, tokens in pairs],
        "slot_bytes": groups.slot_bytes,
        "retention": or_none(groups.retention),
    }


def unique_chunks(groups: GroupChunks, unique_blocks: int) -> int:
    """Return the number of smallest chunks that make up a trace's distinct blocks."""
    return unique_blocks * groups.block_tokens // min(groups.chunk_tokens)
