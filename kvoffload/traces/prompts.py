"""Prompts for an engine from a trace: made-up words, equal as far as the trace's blocks are.

Each block becomes as many words as it has tokens, derived from its id. An id identifies the block
and all before it, so prompts share words exactly as far as the requests share blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import shake_128
from typing import BinaryIO

from kvoffload.errors import describe

from .request import Request

_WORDS_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or
one had by word but not what all were we when your can said there use an each which she do
how their if will up other about out many then them these so some her would make like him
into time has look two more write go see number no way could people my than first water been
call who oil its now find long down day did get come made may part over new sound take only
little work know place year live me back give most very after thing our just name good
sentence man think say great where help through much before line right too mean old any same
tell boy follow came want show also around form three small set put end does another well
large must big even such because turn here why ask went men read need land different home us
move try kind hand picture again change off play spell air away animal house point page
letter mother answer found study still learn should world high every near add food between
own below country plant last school father keep tree never start city earth eye light
thought head under story saw left few while along might close something seem next hard open
example begin life always those both paper together got group often run
"""

WORDS = tuple(_WORDS_TEXT.split())
"""Words that tokenizers of English encode as one token each."""


MOST_WORDS = 2**24  # of a prompt, some 100 MB


def prompt_of(request: Request, block_tokens: int) -> str:
    """Return the prompt of a request: a word for each of its tokens.

    Its length tells how many words the last block has; without a length all blocks are full.
    OverflowError if it would have more than `MOST_WORDS`.
    """
    length = request.input_length or len(request.hash_ids) * block_tokens
    if length > MOST_WORDS:
        rule = f"input_length must be at most {MOST_WORDS} for a prompt of words"
        raise OverflowError(f"{rule}, got {describe(length)}")
    words: list[str] = []
    for hash_id in request.hash_ids:
        wanted = min(block_tokens, length - len(words))
        if wanted <= 0:
            break
        drawn = shake_128(b"%d" % hash_id).digest(wanted)
        words += [WORDS[byte % len(WORDS)] for byte in drawn]
    # tokens without a block: unlike those of any other request
    if length > len(words):
        rest = f"{request.timestamp} {request.hash_ids[-1:]} {length}".encode()
        drawn = shake_128(rest).digest(length - len(words))
        words += [WORDS[byte % len(WORDS)] for byte in drawn]
    return " ".join(words)


def write_prompts(requests: Iterable[Request], stream: BinaryIO, block_tokens: int) -> int:
    """Write requests as a custom dataset of ``vllm bench serve``: JSON Lines, a prompt per line.

    A request without a token is left out: no engine takes an empty prompt.

    Parameters
    ----------
    requests : iterable of Request
        The trace.
    stream : binary file
        Where to write.
    block_tokens : int
        Tokens per block.

    Returns
    -------
    int
        How many were written.

    Raises
    ------
    OverflowError
        If a prompt would have more than 16,777,216 words.
    """
    written = 0
    for request in requests:
        prompt = prompt_of(request, block_tokens)
        if not prompt:
            continue
        row = {"prompt": prompt, "output_tokens": max(1, request.output_length)}
        stream.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        written += 1
    return written
