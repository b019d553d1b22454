"""``kvoffload models``: the models whose KV cache is known by name."""

from __future__ import annotations

from collections import Counter

import click

from kvoffload.advise import model_shape
from kvoffload.advise.answer import column
from kvoffload.advise.model_shape import ModelShape
from kvoffload.advise.models import model_names

from ._options import examples, json_option
from ._output import check_outputs
from ._terminal import print_json, print_prose, print_tables


@click.command(
    epilog=examples(
        "kvoffload models", "kvoffload advise trace.jsonl --model qwen3-8b --capacity 64GiB"
    )
)
@json_option
def models(*, as_json: bool) -> None:
    """List the models that --model takes by name.

    Give any other model by its config.json. Sizes are for one worker and bfloat16.
    """
    check_outputs(())
    shapes = [model_shape(name) for name in model_names()]
    if as_json:
        print_json({"models": [_object(shape) for shape in shapes]})
        return
    print_tables(
        [f"{len(shapes)} models, bfloat16, one worker"],
        [column("model", [shape.name for shape in shapes], numeric=False)],
        [
            [
                column("bytes of\na block", [f"{s.layout().block_bytes:,}" for s in shapes]),
                column("groups × layers", [_groups_text(s) for s in shapes], numeric=False),
            ]
        ],
    )
    click.echo()
    print_prose(
        "--model takes the same name as vllm serve, in any case, with or without the organisation "
        "and the suffixes of variants with the same cache, or the path of a config.json."
    )


def _groups_text(shape: ModelShape) -> str:
    texts = []
    for group, count in Counter(shape.layout().groups).items():
        window = f" {group.window:,}" if group.window else ""
        texts.append(
            f"{count} × {group.layers} {group.kind}{window}, {group.block_tokens:,} tokens"
        )
    return "; ".join(texts)


def _object(shape: ModelShape) -> dict[str, object]:
    return {
        "name": shape.name,
        "source": shape.source,
        "block_bytes": shape.layout().block_bytes,
        "groups": [
            {
                "count": count,
                "layers": group.layers,
                "kind": group.kind,
                "window": group.window or None,
                "block_tokens": group.block_tokens,
            }
            for group, count in Counter(shape.layout().groups).items()
        ],
        "active_parameters": shape.active_parameters or None,
    }
