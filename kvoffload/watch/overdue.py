"""Transfers that were prepared and never completed, whose blocks stay pinned or pending.

A transfer is open from `prepare_load` or `prepare_store` until the same number of blocks with the
same first and last slot is completed. One that was completed in other parts has ended if none of
its slots is pinned or pending. Past its deadline a transfer is overdue. Nothing is released, since
the engine may still write to these slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Overdue", "find_overdue"]

MATCHED_S = 1.0
"""Age, seconds, from which the slots of an open transfer are looked at."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A transfer that is past its deadline.

    Attributes
    ----------
    kind : str
        ``"load"`` or ``"store"``.
    seconds : float
        Seconds since it was prepared.
    block_ids : tuple of int
        Its slots that are still pinned (load) or pending (store).
    num_blocks : int
        Blocks of the whole transfer.
    id : int
        Number of the transfer, from 1 in the order of preparation.
    """

    kind: str
    seconds: float
    block_ids: tuple[int, ...]
    num_blocks: int
    id: int


def find_overdue(core: Any, manager: Any, deadline: float) -> list[Overdue]:
    """Return the overdue transfers, oldest first; close those that ended in other parts.

    O(open transfers), and O(resident blocks) if one is as old as `MATCHED_S` or the deadline.
    """
    age = min(deadline, MATCHED_S)
    late = [transfer for transfer in core.open_transfers() if transfer[2] > age]
    if not late:
        return []
    table = manager.block_table
    busy = {
        "load": set(table["block_id"][table["ref_cnt"] > 0].tolist()),
        "store": set(table["block_id"][table["ref_cnt"] < 0].tolist()),
    }
    found = []
    for transfer_id, kind, seconds, ids in late:
        held = tuple(block_id for block_id in ids if block_id in busy[kind])
        if held and seconds > deadline:
            found.append(Overdue(kind, seconds, held, len(ids), transfer_id))
        elif not held:
            core.close_transfer(transfer_id)
    return found
