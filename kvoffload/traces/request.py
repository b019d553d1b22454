"""One request of a trace."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

MAX_TOKENS = 2**63 - 1
MAX_MILLISECONDS = 2**63 - 1
MAX_HASH_ID = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its arrival, its lengths, and the blocks of its prompt.

    Attributes
    ----------
    timestamp : int or float
        Arrival, milliseconds since the start of the trace, below 2**63; 0 in all requests if it is
        not known.
    input_length : int
        Prompt, tokens; 0 with blocks if it is not known.
    output_length : int
        Answer, tokens; 0 if it is not known.
    hash_ids : tuple of int
        The prompt's blocks, first block first, each in [0, 2**64). Ids are prefix-chained: equal
        ids mean equal prompts up to and including that block. The last block may be only partly
        filled.
    session : str or None
        The conversation that the request belongs to, if the trace states it.
    parent : str or None
        The session that spawned this one.
    think : int or float or None
        Wait since the session's previous request ended, milliseconds.
    service : int or float or None
        Duration of the request, milliseconds.
    stop : str or None
        Why its answer ended.
    ends : bool
        Whether it is the session's last, and not just the last of a window.
    expect : int or float or None
        Time until the session's next request, milliseconds, as a client would say it.
    type : str or None
        The kind of request, as the trace names it.
    turn : int or None
        Its number within the conversation, from 1.
    """

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: str | None = None
    _: KW_ONLY
    parent: str | None = None
    think: int | float | None = None
    service: int | float | None = None
    stop: str | None = None
    ends: bool = False
    expect: int | float | None = None
    type: str | None = None
    turn: int | None = None
