"""Remarks on the slots of a model with groups, and on its chunks and windows."""

from __future__ import annotations

from collections import Counter

from kvoffload.replay.groups import GroupChunks

__all__ = ["group_remarks", "prompt_text"]

PROMPT_TOKENS = 8192
"""Tokens of the prompt whose slots `prompt_text` counts."""


def prompt_text(groups: GroupChunks) -> str:
    """Return the slots that a prompt takes, and those of its windows and states, in words."""
    length = max(PROMPT_TOKENS, *groups.chunk_tokens)
    kinds = [group.kind for group in groups.layout.groups]
    indexes = {index for call in groups.offers(length, 0, 0) for index in call}
    slots = Counter(kinds[index.group] for index in indexes)
    texts = [str(slots["full"] + slots["chunked"])]
    for kind in ("window", "state"):
        count = kinds.count(kind)
        if count:
            texts.append(f"{slots[kind]} for its {kind}{'s' if count > 1 else ''}")
    if not slots["full"] + slots["chunked"]:
        texts = texts[1:]
    return f"a prompt of {length:,} tokens takes {', and '.join(texts)}"


def group_remarks(groups: GroupChunks) -> list[str]:
    """Return remarks on chunks that differ from vLLM's, and on windows stored incompletely."""
    found: list[str] = []
    if not groups.is_exact:
        theirs = ", ".join(f"{tokens:,}" for tokens in dict.fromkeys(groups.engine_chunk_tokens))
        ours = ", ".join(f"{tokens:,}" for tokens in dict.fromkeys(groups.chunk_tokens))
        found.append(
            f"The trace has blocks of {groups.block_tokens:,} tokens: chunks of {ours} tokens "
            f"stand for vLLM's of {theirs}."
        )
    pairs = zip(groups.layout.groups, groups.engine_chunk_tokens, strict=True)
    for window, chunk in dict.fromkeys((g.window, c) for g, c in pairs if g.kind == "window"):
        chunks, more = divmod(window, chunk)
        if chunks and more == 1:
            found.append(
                f"A window of {window:,} tokens is one more than {chunks:,} × {chunk:,}: vLLM "
                "stores a chunk less of it than a hit needs, so fewer prompts hit. Another size of "
                "chunk avoids that."
            )
    return found
