"""Bytes as a log of requests or a table of prompts: valid requests, or one error of one line.

The first byte chooses the format, the second the compression that the rest is put into.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvoffload.traces import PromptOptions

from .reading import MAX_LINE_BYTES, PACKINGS, check_figures, read_skipping

FORMATS = (
    *("openai", "csv", "anthropic", "responses", "litellm", "litellm-blocks", "langfuse"),
    *("helicone", "openrouter", "otel", None),
)
FIELDS = {"time": "t", "prompt": "p", "model": "m", "output": "o", "session": "s"}


def run_prompts(data: bytes) -> int:
    """Read the log that the bytes stand for; return how many requests it holds."""
    head, body = data[:2].ljust(2, b"\0"), data[2:]
    format = FORMATS[head[0] % len(FORMATS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.write_bytes(PACKINGS[head[1] % len(PACKINGS)](body))
        lenient, again = (
            read_skipping(
                path,
                format=format,
                max_line_bytes=MAX_LINE_BYTES,
                prompts=PromptOptions(
                    block_tokens=2,
                    bytes_per_token=1,
                    tokens_per_image=20,
                    salt="fuzz",
                    fields=FIELDS if format == "csv" else None,
                ),
            )
            for _ in range(2)
        )
        if again != lenient:
            raise AssertionError(f"two readings with one salt differ: {lenient} {again}")
        if lenient:
            check_figures(lenient)
    return len(lenient)
